//! Who uses whom: the arrows between the modules of a crate, and what is wrong with them.

use crate::scan::{scan, Scanned};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

type Module = Vec<String>;

/// A part of a crate that others may use or not: a module of the crate's root, or of another module.
#[derive(Clone, Copy)]
pub struct Room {
    pub name: &'static str,
    /// The other rooms that it may use.
    pub may_use: &'static [&'static str],
}

/// The rooms of one module.
pub struct Floor {
    /// The module that they are in; empty for the root of the crate.
    pub module: &'static str,
    pub rooms: &'static [Room],
    /// Whether every room of the module has to be in `rooms`, and each of those has to exist.
    pub complete: bool,
}

/// The sources of a crate.
#[derive(Default)]
pub struct Sources {
    files: Vec<File>,
    modules: BTreeSet<Module>,
    /// Modules that are folders.
    folders: BTreeSet<Module>,
    /// What names in a module stand for, by its `use` lines.
    names: BTreeMap<(Module, String), Module>,
}

struct File {
    path: String,
    module: Module,
    scanned: Scanned,
}

/// A use of one module in another.
struct Arrow<'s> {
    file: &'s str,
    line: usize,
    from: &'s [String],
    /// What is named, and what that stands for where names are passed on.
    to: Vec<Module>,
}

impl Arrow<'_> {
    fn place(&self) -> String {
        format!("{}:{}", self.file, self.line)
    }
}

impl Sources {
    /// Reads `src` in `root`, without programs.
    pub fn read(root: &Path) -> Self {
        let mut texts = Vec::new();
        let mut folders = vec![root.join("src")];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(&folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() && !path.ends_with("src/bin") {
                    folders.push(path);
                } else if path.extension().is_some_and(|extension| extension == "rs") {
                    let name = path.strip_prefix(root).unwrap().to_string_lossy().replace('\\', "/");
                    texts.push((name, fs::read_to_string(&path).unwrap()));
                }
            }
        }
        texts.sort();
        Self::new(texts.iter().map(|(path, text)| (path.as_str(), text.as_str())))
    }

    /// Sources by their paths, such as `src/nn/mod.rs`.
    pub fn new<'t>(texts: impl IntoIterator<Item = (&'t str, &'t str)>) -> Self {
        let mut sources = Self::default();
        for (path, text) in texts {
            let inner = path.strip_prefix("src/").unwrap_or(path).trim_end_matches(".rs");
            let mut module: Module = inner.split('/').map(str::to_owned).collect();
            if module.last().is_some_and(|last| last == "mod" || last == "lib") {
                module.pop();
            }
            let scanned = scan(text);
            let written_out = scanned.modules.iter().map(|inner| [module.as_slice(), inner].concat());
            sources.modules.extend(written_out);
            for len in 1..module.len() {
                sources.folders.insert(module[..len].to_vec());
            }
            if path.ends_with("/mod.rs") {
                sources.folders.insert(module.clone());
            }
            sources.modules.insert(module.clone());
            sources.files.push(File { path: path.to_owned(), module, scanned });
        }
        for file in &sources.files {
            for named in &file.scanned.named {
                let within = [file.module.as_slice(), &named.within].concat();
                if let (Some(name), Some(path)) = (&named.as_name, sources.absolute(&within, &named.path)) {
                    sources.names.insert((within, name.clone()), path);
                }
            }
        }
        sources
    }

    /// A path as seen from the root of the crate; none if it leads to another crate, or is no path of modules.
    fn absolute(&self, within: &[String], path: &[String]) -> Option<Module> {
        let (first, rest) = path.split_first()?;
        match first.as_str() {
            "crate" => Some(rest.to_vec()),
            "self" => Some([within, rest].concat()),
            "super" => {
                let supers = path.iter().take_while(|part| *part == "super").count();
                let outer = within.get(..within.len().checked_sub(supers)?)?;
                Some([outer, &path[supers..]].concat())
            }
            _ => {
                let child = [within, &path[..1]].concat();
                self.modules.contains(&child).then(|| [within, path].concat())
            }
        }
    }

    /// A path, and whatever it stands for, step by step.
    fn followed(&self, path: Module) -> Vec<Module> {
        let mut steps = vec![path];
        // A name that stands for itself would be followed for ever.
        while let Some(path) = steps.last().filter(|_| steps.len() < 8) {
            let is_no_module = |len: &usize| !self.modules.contains(&path[..*len]);
            let Some(len) = (1..=path.len()).find(is_no_module) else { break };
            let name = (path[..len - 1].to_vec(), path[len - 1].clone());
            let Some(target) = self.names.get(&name) else { break };
            let next = [target.as_slice(), &path[len..]].concat();
            steps.push(next);
        }
        steps
    }

    fn arrows(&self) -> impl Iterator<Item = Arrow<'_>> {
        let of_file = |file: &'_ File| -> Vec<(usize, Vec<Module>)> {
            let steps = |within: &[String], path: &[String]| {
                let within = [file.module.as_slice(), within].concat();
                self.absolute(&within, path).map(|path| self.followed(path))
            };
            let named = file.scanned.named.iter();
            named.filter_map(|named| Some((named.line, steps(&named.within, &named.path)?))).collect()
        };
        self.files.iter().flat_map(move |file| {
            let arrow = |(line, to)| Arrow { file: &file.path, line, from: &file.module, to };
            of_file(file).into_iter().map(arrow)
        })
    }

    /// The arrows between the modules in `module`, each from room to room.
    fn arrows_in<'s>(&'s self, module: &'s [String]) -> impl Iterator<Item = (Arrow<'s>, &'s str, String)> {
        let depth = module.len();
        self.arrows().filter_map(move |arrow| {
            let from = arrow.from.strip_prefix(module)?.first()?.as_str();
            let is_room = |to: &&Module| {
                to.starts_with(module) && to.len() > depth && self.modules.contains(&to[..=depth])
            };
            // Where a room passes on what it has from another one, it answers for that.
            let room = arrow.to.iter().find(is_room).map(|to| to[depth].clone());
            let room = room.filter(|to| to != from)?;
            Some((arrow, from, room))
        })
    }

    /// Arrows that the table of rooms does not allow.
    pub fn forbidden(&self, floor: &Floor) -> Vec<String> {
        let module = path_of(floor.module);
        let room = |name: &str| floor.rooms.iter().find(|room| room.name == name);
        let mut problems = Vec::new();
        if floor.complete {
            let inside = |all: &BTreeSet<Module>| -> BTreeSet<String> {
                let inside = all.iter().filter(|path| path.starts_with(&module));
                inside.filter_map(|path| path.get(module.len()).cloned()).collect()
            };
            let of_files = self.files.iter().map(|file| file.module.clone()).collect();
            let existing = inside(&of_files);
            let unknown = existing.iter().filter(|name| room(name).is_none());
            problems.extend(unknown.map(|name| format!("`{name}` is not in the table of rooms")));
            let gone = floor.rooms.iter().filter(|room| !existing.contains(room.name));
            problems.extend(gone.map(|room| format!("there is no room `{}` any more", room.name)));
        }
        for (at, room) in floor.rooms.iter().enumerate() {
            let earlier = |name: &&&str| floor.rooms[..at].iter().any(|room| room.name == **name);
            let upward = room.may_use.iter().filter(|name| !earlier(name));
            problems.extend(upward.map(|name| {
                format!("the table lets `{}` use `{name}`, which does not come before it", room.name)
            }));
        }
        for (arrow, from, to) in self.arrows_in(&module) {
            let Some(from) = room(from) else { continue };
            let is_listed = floor.complete || room(&to).is_some();
            if is_listed && !from.may_use.contains(&to.as_str()) {
                let allowed = match from.may_use {
                    [] => "no other room".to_owned(),
                    rooms => rooms.join(", "),
                };
                problems.push(format!(
                    "{}: `{}` uses `{to}`; it may use {allowed}",
                    arrow.place(),
                    from.name
                ));
            }
        }
        problems.sort();
        problems.dedup();
        problems
    }

    /// Circles between the folders of a module, each with one place for every arrow of it.
    pub fn circles(&self, module: &str) -> Vec<String> {
        let module = path_of(module);
        let is_folder = |name: &str| self.folders.contains(&[module.as_slice(), &[name.to_owned()]].concat());
        let mut arrows: BTreeMap<String, BTreeMap<String, String>> = BTreeMap::new();
        for (arrow, from, to) in self.arrows_in(&module) {
            if is_folder(from) && is_folder(&to) {
                arrows.entry(from.to_owned()).or_default().entry(to).or_insert_with(|| arrow.place());
            }
        }
        let mut circles = Vec::new();
        for start in arrows.keys() {
            // Each circle is told once, from its first folder on.
            let mut ways = vec![vec![start]];
            let mut seen = BTreeSet::new();
            while let Some(way) = ways.pop() {
                let Some(next) = way.last().and_then(|last| arrows.get(*last)) else { continue };
                for to in next.keys() {
                    if to == start {
                        let steps = way.iter().zip(way.iter().skip(1).chain([&start]));
                        let tell = |(from, to): (&&String, &&String)| {
                            format!("`{from}` uses `{to}` ({})", arrows[*from][*to])
                        };
                        circles.push(format!("a circle: {}", steps.map(tell).collect::<Vec<_>>().join(", ")));
                    } else if to > start && seen.insert(to) {
                        ways.push([way.as_slice(), &[to]].concat());
                    }
                }
            }
        }
        circles
    }

    /// The modules of the root that have folders.
    pub fn floors(&self) -> Vec<String> {
        let folders = self.folders.iter().filter(|folder| folder.len() == 1);
        folders.map(|folder| folder.join("::")).collect()
    }
}

fn path_of(module: &str) -> Module {
    module.split("::").filter(|part| !part.is_empty()).map(str::to_owned).collect()
}
