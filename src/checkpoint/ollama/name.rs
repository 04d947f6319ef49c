//! Names of models: `qwen3:4b`, `library/qwen3:4b`, `registry.ollama.ai/library/qwen3:4b`.

use std::fmt;

const DEFAULT_HOST: &str = "registry.ollama.ai";
const DEFAULT_NAMESPACE: &str = "library";
const DEFAULT_TAG: &str = "latest";

/// The name of a model, complete. Each of its parts is a plain file name: none can lead out of a directory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Name {
    host: String,
    namespace: String,
    model: String,
    tag: String,
}

/// What a part is decides which characters it may have and how long it may be.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Host,
    Namespace,
    Model,
    Tag,
}

impl Name {
    /// `[scheme://][[host/]namespace/]model[:tag]`, with Ollama's defaults for what is left out. `None` if it
    /// is not a name.
    pub fn parse(text: &str) -> Option<Self> {
        // A host may have a port: only a colon behind the last slash is that of a tag.
        let (path, tag) = match (text.rfind(':'), text.rfind('/')) {
            (Some(colon), slash) if slash.is_none_or(|slash| slash < colon) => {
                text.split_at_checked(colon).map(|(path, tag)| (path, tag.get(1..)))?
            }
            _ => (text, None),
        };
        let (path, model) = split_last(path);
        let (host, namespace) = match path {
            None => (None, None),
            Some(path) => {
                let (host, namespace) = split_last(path);
                (host, Some(namespace))
            }
        };
        let host = host.map(|host| host.split_once("://").map_or(host, |(_scheme, host)| host));
        Self::new([
            host.unwrap_or(DEFAULT_HOST),
            namespace.unwrap_or(DEFAULT_NAMESPACE),
            model,
            tag.unwrap_or(DEFAULT_TAG),
        ])
    }

    /// A name of these parts: host, namespace, model, tag. `None` if one of them is not allowed.
    pub(super) fn new([host, namespace, model, tag]: [&str; 4]) -> Option<Self> {
        let part = |part: Part, text: &str| part.allows(text).then(|| text.to_owned());
        Some(Self {
            host: part(Part::Host, host)?,
            namespace: part(Part::Namespace, namespace)?,
            model: part(Part::Model, model)?,
            tag: part(Part::Tag, tag)?,
        })
    }

    /// Host, namespace, model and tag: the path of the manifest.
    pub fn parts(&self) -> [&str; 4] {
        [&self.host, &self.namespace, &self.model, &self.tag]
    }
}

/// What is behind the last slash, and what is before it, if there is one.
fn split_last(path: &str) -> (Option<&str>, &str) {
    path.rsplit_once('/').map_or((None, path), |(before, last)| (Some(before), last))
}

impl Part {
    fn allows(self, text: &str) -> bool {
        let longest = if self == Self::Host { 350 } else { 80 };
        let is_word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
        let mut bytes = text.bytes();
        text.len() <= longest
            && bytes.next().is_some_and(is_word)
            && bytes.all(|byte| match byte {
                b'-' => true,
                b'.' => self != Self::Namespace,
                b':' => self == Self::Host,
                other => is_word(other),
            })
    }
}

/// As users write it: without the parts that are Ollama's defaults, but with the tag.
impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, namespace, model, tag } = self;
        match (host == DEFAULT_HOST, namespace == DEFAULT_NAMESPACE) {
            (true, true) => write!(f, "{model}:{tag}"),
            (true, false) => write!(f, "{namespace}/{model}:{tag}"),
            (false, _) => write!(f, "{host}/{namespace}/{model}:{tag}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Name;

    #[test]
    fn names_have_ollamas_defaults() {
        for (text, parts, shown) in [
            ("qwen3", ["registry.ollama.ai", "library", "qwen3", "latest"], "qwen3:latest"),
            ("qwen3:4b", ["registry.ollama.ai", "library", "qwen3", "4b"], "qwen3:4b"),
            ("me/qwen3", ["registry.ollama.ai", "me", "qwen3", "latest"], "me/qwen3:latest"),
            ("host:5000/ns/m", ["host:5000", "ns", "m", "latest"], "host:5000/ns/m:latest"),
            ("https://h.example/ns/m.x:v1.0", ["h.example", "ns", "m.x", "v1.0"], "h.example/ns/m.x:v1.0"),
            (
                "registry.ollama.ai/library/a-b_c:q4_K_M",
                ["registry.ollama.ai", "library", "a-b_c", "q4_K_M"],
                "a-b_c:q4_K_M",
            ),
        ] {
            let name = Name::parse(text).unwrap_or_else(|| panic!("{text}"));
            assert_eq!((name.parts(), name.to_string().as_str()), (parts, shown));
            assert_eq!(Name::parse(shown), Some(name));
        }
    }

    #[test]
    fn names_do_not_leave_their_directory() {
        let long = "a".repeat(81);
        for text in [
            "",
            ":",
            "qwen3:",
            ":4b",
            "/",
            "a/",
            "/a",
            "//a",
            "a//b",
            "a//b/c",
            ".",
            "..",
            "../a",
            "a/..",
            "a/../b",
            "..:x",
            "a:..",
            "a:.",
            "a:../b",
            ".hidden",
            "-a",
            "a:-b",
            "/etc/passwd",
            "/a/b/c",
            "~/m",
            "./m",
            "a/./b",
            "a\\b",
            "a\\..\\b",
            "C:\\m",
            "a b",
            "a\0b",
            "a\n",
            "ä",
            "n.s/m",
            "n:s/m",
            "a/b/c/d",
            "a/b/c/d:e",
            "m:a:b",
            "x://m",
            "x://n/m",
            "https:///n/m",
            "h/n/m%2e",
            "%2e%2e/m",
            "a:\u{2024}",
            long.as_str(),
        ] {
            assert_eq!(Name::parse(text), None, "{text:?}");
        }
        for (length, allowed) in [(80, true), (81, false)] {
            let part = "a".repeat(length);
            assert_eq!(Name::parse(&part).is_some(), allowed);
            assert_eq!(Name::parse(&format!("{part}/m")).is_some(), allowed);
            assert_eq!(Name::parse(&format!("m:{part}")).is_some(), allowed);
        }
        for (length, allowed) in [(350, true), (351, false)] {
            assert_eq!(Name::parse(&format!("{}/n/m", "h".repeat(length))).is_some(), allowed);
        }
    }
}
