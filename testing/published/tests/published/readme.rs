use crate::PACKAGES;
use cargo_metadata::camino::{Utf8Path, Utf8PathBuf};
use published::{Package, repository};
use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};
use regex::Regex;
use std::fs;

/// Where links and pictures of a text lead.
fn targets(markdown: &str) -> Vec<String> {
    let html = Regex::new(r#"\b(?:href|src|srcset)\s*=\s*["']([^"']*)["']"#).unwrap();
    let mut targets = Vec::new();
    for event in Parser::new_ext(markdown, Options::all()) {
        match event {
            Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                targets.push(dest_url.to_string())
            }
            Event::Html(text) | Event::InlineHtml(text) => {
                targets.extend(html.captures_iter(&text).map(|found| found[1].to_string()));
            }
            _ => {}
        }
    }
    targets
}

/// The names that `#name` can lead to in a text, as GitHub makes them.
fn anchors(markdown: &str) -> Vec<String> {
    let id = Regex::new(r#"<[^>]*\b(?:id|name)="([^"]*)""#).unwrap();
    let mut anchors: Vec<String> = id.captures_iter(markdown).map(|found| found[1].to_string()).collect();
    let mut heading: Option<String> = None;
    for event in Parser::new_ext(markdown, Options::all()) {
        match event {
            Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
            Event::End(TagEnd::Heading(_)) => {
                let text = heading.take().unwrap_or_default().to_lowercase();
                let kept = text.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
                anchors.push(kept.map(|c| if c == ' ' { '-' } else { c }).collect());
            }
            Event::Text(text) | Event::Code(text) => {
                if let Some(heading) = &mut heading {
                    heading.push_str(&text);
                }
            }
            _ => {}
        }
    }
    anchors
}

/// What is wrong with a link of a README. A registry resolves a relative one from the folder that the package has in the
/// repository, and links to the file there; so it leads somewhere if the repository has the file.
fn problem(package: &Package, target: &str, readme: &str) -> Option<String> {
    let (path, anchor) = target.split_once('#').map_or((target, None), |(path, anchor)| (path, Some(anchor)));
    if target.starts_with("https://") {
        return None;
    }
    if target.contains(':') {
        return Some("neither https nor relative".into());
    }
    if path.starts_with('/') || path.contains('?') {
        return Some("a registry does not resolve it as a file system does".into());
    }
    if path.is_empty() {
        return match anchors(readme).iter().any(|name| Some(name.as_str()) == anchor) {
            true => None,
            false => Some("no heading of that name".into()),
        };
    }
    let mut resolved = Utf8PathBuf::new();
    for part in package.folder.join(path).components().map(|part| part.as_str().to_string()) {
        match part.as_str() {
            "." => {}
            ".." => {
                if !resolved.pop() {
                    return Some("it leads out of the repository".into());
                }
            }
            name => resolved.push(name),
        }
    }
    let file = Utf8Path::from_path(repository()).unwrap().join(&resolved);
    if !file.exists() {
        return Some(format!("the repository has no {resolved}"));
    }
    let anchor = anchor?;
    // The page of a folder shows its README.
    let text =
        if file.is_dir() { fs::read_to_string(file.join("README.md")) } else { fs::read_to_string(&file) };
    let text = text.unwrap_or_default();
    match anchors(&text).iter().any(|name| name == anchor) {
        true => None,
        false => Some(format!("{resolved} has no heading of that name")),
    }
}

#[test]
fn links_lead_somewhere_from_a_page_of_a_registry() {
    for (name, package) in &PACKAGES.packages {
        // Of the hosts that crates.io knows. Elsewhere it leaves relative links out.
        let repository = package.metadata.repository.as_deref().unwrap_or_default();
        assert!(
            ["https://github.com/", "https://gitlab.com/"].iter().any(|host| repository.starts_with(host)),
            "{name}: the repository is {repository:?}"
        );
        let readme = package.text("README.md").unwrap();
        let targets = targets(readme);
        assert!(!targets.is_empty(), "{name}: a README without links");
        for target in targets {
            if let Some(problem) = problem(package, &target, readme) {
                panic!("{name}: README.md links to {target}: {problem}");
            }
        }
    }
}

#[test]
fn links_that_lead_nowhere_are_found() {
    let package = &PACKAGES.packages["candle-quant-nn"];
    let readme =
        "# A `b` c\n[a](../../README.md#what-runs) <img src=\"../../docs/overview.svg\"> [b](#a-b-c)\n";
    assert_eq!(targets(readme), ["../../README.md#what-runs", "../../docs/overview.svg", "#a-b-c"]);
    for target in targets(readme) {
        assert_eq!(problem(package, &target, readme), None, "{target}");
    }
    let wrong = [
        "README",
        "../../../h1/README.md",
        "../../README.md#what",
        "#a",
        "http://a.b",
        "/README.md",
        "mailto:a@b.c",
    ];
    for target in wrong {
        assert!(problem(package, target, readme).is_some(), "{target}");
    }
}
