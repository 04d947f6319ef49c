//! Public items counted twice: in the syntax tree, and by the lines that begin one.

use std::collections::BTreeMap;
use syn::visit::{self, Visit};
use syn::{Item, Visibility};

/// How many there are of a kind, by its keyword. Methods count as `fn`.
pub type Counts = BTreeMap<&'static str, usize>;

const KEYWORDS: [&str; 7] = ["const", "enum", "fn", "static", "struct", "trait", "type"];

/// Adds the lines of `text` that begin a public item.
pub fn count_lines(text: &str, counts: &mut Counts) {
    for line in text.lines() {
        let mut words = line.split_whitespace().peekable();
        if words.next() != Some("pub") {
            continue;
        }
        while let Some(word) = words.next() {
            let next = words.peek().copied();
            let is_qualifier = ["async", "unsafe", "extern", "\"C\""].contains(&word)
                || (word == "const" && next == Some("fn"));
            if is_qualifier {
                continue;
            }
            let word = word.split('<').next();
            if let Some(keyword) = KEYWORDS.iter().find(|keyword| word == Some(keyword)) {
                *counts.entry(keyword).or_default() += 1;
            }
            break;
        }
    }
}

/// Adds the public items in `item`, itself among them.
pub fn count_items(item: &Item, counts: &mut Counts) {
    struct Counter<'a>(&'a mut Counts);

    impl Counter<'_> {
        fn count(&mut self, keyword: &'static str, visibility: &Visibility) {
            if matches!(visibility, Visibility::Public(_)) {
                *self.0.entry(keyword).or_default() += 1;
            }
        }
    }

    impl<'ast> Visit<'ast> for Counter<'_> {
        fn visit_item(&mut self, item: &'ast Item) {
            match item {
                Item::Const(item) => self.count("const", &item.vis),
                Item::Enum(item) => self.count("enum", &item.vis),
                Item::Fn(item) => self.count("fn", &item.vis),
                Item::Static(item) => self.count("static", &item.vis),
                Item::Struct(item) => self.count("struct", &item.vis),
                Item::Trait(item) => self.count("trait", &item.vis),
                Item::Type(item) => self.count("type", &item.vis),
                _ => {}
            }
            visit::visit_item(self, item);
        }

        fn visit_impl_item(&mut self, item: &'ast syn::ImplItem) {
            match item {
                syn::ImplItem::Fn(item) => self.count("fn", &item.vis),
                syn::ImplItem::Const(item) => self.count("const", &item.vis),
                _ => {}
            }
            visit::visit_impl_item(self, item);
        }
    }

    Counter(counts).visit_item(item);
}
