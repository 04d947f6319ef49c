//! candle_nn's source as a tree of modules, and what of it a user can name.

use crate::count::{Counts, count_items, count_lines};
use quote::quote;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path as File, PathBuf};
use syn::{Attribute, Ident, Item, ItemImpl, Meta, UseTree, Visibility};

/// `["crate", "conv", "conv2d"]`. Those of other crates begin with the crate's name.
pub type Path = Vec<String>;

/// Of one module what the features have left.
#[derive(Default)]
pub struct Module {
    pub items: Vec<Item>,
    /// What names of the module mean: its own items and its imports.
    names: BTreeMap<String, Path>,
    /// Its modules. One may have the name of a function.
    children: BTreeSet<String>,
}

pub struct Sources {
    pub modules: BTreeMap<Path, Module>,
    /// Public items by a count of the lines that begin one.
    pub written: Counts,
    /// Public items in files that are compiled, but not with these features.
    pub off: Counts,
}

impl Sources {
    /// Reads the crate in `folder`.
    pub fn read(folder: &File) -> Self {
        let mut sources =
            Self { modules: BTreeMap::new(), written: Counts::default(), off: Counts::default() };
        sources.read_file(vec!["crate".into()], &folder.join("src/lib.rs"), &folder.join("src"));
        sources
    }

    fn read_file(&mut self, path: Path, file: &File, folder: &File) {
        let text =
            std::fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        count_lines(&text, &mut self.written);
        let parsed = syn::parse_file(&text).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        self.read_items(path, parsed.items, folder);
    }

    fn read_items(&mut self, path: Path, items: Vec<Item>, folder: &File) {
        let mut module = Module::default();
        for item in items {
            if !parts(&item).2.iter().all(is_on) {
                count_items(&item, &mut self.off);
                continue;
            }
            let Item::Mod(child) = &item else {
                if let Some(name) = name_of(&item) {
                    module.names.insert(name.clone(), join(&path, &name));
                }
                module.items.push(item);
                continue;
            };
            let name = child.ident.to_string();
            module.children.insert(name.clone());
            let (child_path, child_folder) = (join(&path, &name), folder.join(&name));
            match &child.content {
                Some((_, items)) => self.read_items(child_path, items.clone(), &child_folder),
                None => {
                    let files: [PathBuf; 2] =
                        [folder.join(format!("{name}.rs")), child_folder.join("mod.rs")];
                    let file = files.iter().find(|file| file.exists());
                    let file = file.unwrap_or_else(|| panic!("no file of the module {child_path:?}"));
                    self.read_file(child_path, file, &child_folder);
                }
            }
            module.items.push(item);
        }
        let imports: Vec<_> = module.items.iter().flat_map(imports).collect();
        for (name, target) in imports.into_iter().filter(|(name, _)| name != "*") {
            let target = absolute(&module, &path, &target).unwrap_or(target);
            module.names.insert(name, target);
        }
        self.modules.insert(path, module);
    }

    /// What a path in the module `within` means; `None` for the prelude and whatever else needs no import.
    pub fn absolute(&self, within: &Path, path: &[String]) -> Option<Path> {
        absolute(&self.modules[within], within, path)
    }

    /// Where the item is defined that `path` leads to.
    pub fn definition(&self, path: Path) -> Path {
        let Some((name, parent)) = path.split_last() else { return path };
        let Some(module) = self.modules.get(parent) else { return path };
        match module.names.get(name) {
            Some(target) if *target != path => self.definition(target.clone()),
            _ => path,
        }
    }

    /// The item defined at `path`, other than a module.
    pub fn item(&self, path: &Path) -> Option<&Item> {
        let (name, parent) = path.split_last()?;
        let is_it = |item: &&Item| !matches!(item, Item::Mod(_)) && name_of(item).as_ref() == Some(name);
        self.modules.get(parent)?.items.iter().find(is_it)
    }

    /// Every path that a user can write, with the definition it leads to: items of this crate and of others.
    pub fn exports(&self) -> BTreeMap<Path, Path> {
        let mut exports = BTreeMap::new();
        let root = vec!["crate".to_string()];
        self.export(&root, &root, &mut exports);
        exports
    }

    fn export(&self, module: &Path, public: &Path, exports: &mut BTreeMap<Path, Path>) {
        for item in &self.modules[module].items {
            if !matches!(parts(item).1, Visibility::Public(_)) {
                continue;
            }
            for (name, target) in imports(item) {
                let target = self.absolute(module, &target).unwrap_or(target);
                let public = if name == "*" { public.clone() } else { join(public, &name) };
                if self.modules.contains_key(&target) {
                    self.export(&target, &public, exports);
                } else {
                    assert!(name != "*", "{module:?} exports all of {target:?}, which is not known here");
                }
                let definition = self.definition(target);
                if definition[0] != "crate" || self.item(&definition).is_some() {
                    exports.insert(public, definition);
                }
            }
            let Some(name) = name_of(item) else { continue };
            match item {
                Item::Mod(_) => self.export(&join(module, &name), &join(public, &name), exports),
                _ => drop(exports.insert(join(public, &name), join(module, &name))),
            }
        }
    }

    /// Implementations, each with the module it is written in.
    pub fn impls(&self) -> impl Iterator<Item = (&Path, &ItemImpl)> {
        self.modules.iter().flat_map(|(path, module)| {
            let impls = module.items.iter().filter_map(|item| match item {
                Item::Impl(item) => Some(item),
                _ => None,
            });
            impls.map(move |item| (path, item))
        })
    }
}

/// `path` with one more name.
pub fn join(path: &[String], name: &str) -> Path {
    path.iter().cloned().chain([name.to_string()]).collect()
}

fn absolute(module: &Module, within: &Path, path: &[String]) -> Option<Path> {
    let (first, rest) = path.split_first()?;
    let start = match first.as_str() {
        "crate" => vec!["crate".into()],
        "self" => within.clone(),
        "super" if rest.first().is_some_and(|name| name == "super") => {
            return absolute(module, &within[..within.len() - 1].to_vec(), rest);
        }
        "super" => within[..within.len() - 1].to_vec(),
        // candle_nn's name of candle_core.
        "candle" => vec!["candle_core".into()],
        name if !rest.is_empty() && module.children.contains(name) => join(within, name),
        name => match module.names.get(name) {
            Some(target) => target.clone(),
            // Another crate.
            None if !rest.is_empty() && name.starts_with(char::is_lowercase) => vec![name.into()],
            None => return None,
        },
    };
    Some(start.into_iter().chain(rest.iter().cloned()).collect())
}

/// What a `use` brings, under which names; the name of a glob is `*`.
fn imports(item: &Item) -> Vec<(String, Path)> {
    fn collect(tree: &UseTree, path: Path, imports: &mut Vec<(String, Path)>) {
        match tree {
            UseTree::Path(tree) => collect(&tree.tree, join(&path, &tree.ident.to_string()), imports),
            UseTree::Group(group) => group.items.iter().for_each(|tree| collect(tree, path.clone(), imports)),
            UseTree::Glob(_) => imports.push(("*".into(), path)),
            UseTree::Name(name) if name.ident == "self" => {
                imports.push((path.last().cloned().unwrap_or_default(), path));
            }
            UseTree::Name(name) => {
                imports.push((name.ident.to_string(), join(&path, &name.ident.to_string())))
            }
            UseTree::Rename(name) => {
                imports.push((name.rename.to_string(), join(&path, &name.ident.to_string())));
            }
        }
    }
    let mut imports = Vec::new();
    if let Item::Use(item) = item {
        collect(&item.tree, Vec::new(), &mut imports);
    }
    imports
}

/// Name, visibility and attributes of an item.
fn parts(item: &Item) -> (Option<&Ident>, &Visibility, &[Attribute]) {
    match item {
        Item::Const(item) => (Some(&item.ident), &item.vis, &item.attrs),
        Item::Enum(item) => (Some(&item.ident), &item.vis, &item.attrs),
        Item::Fn(item) => (Some(&item.sig.ident), &item.vis, &item.attrs),
        Item::Impl(item) => (None, &Visibility::Inherited, &item.attrs),
        // A macro for the crate itself.
        Item::Macro(item)
            if item.ident.is_some() && !item.attrs.iter().any(|one| one.path().is_ident("macro_export")) =>
        {
            (None, &Visibility::Inherited, &item.attrs)
        }
        Item::Mod(item) => (Some(&item.ident), &item.vis, &item.attrs),
        Item::Static(item) => (Some(&item.ident), &item.vis, &item.attrs),
        Item::Struct(item) => (Some(&item.ident), &item.vis, &item.attrs),
        Item::Trait(item) => (Some(&item.ident), &item.vis, &item.attrs),
        Item::Type(item) => (Some(&item.ident), &item.vis, &item.attrs),
        Item::Use(item) => (None, &item.vis, &item.attrs),
        other => panic!("this test has to learn of another kind of item: {}", quote!(#other)),
    }
}

fn name_of(item: &Item) -> Option<String> {
    parts(item).0.map(ToString::to_string)
}

/// Whether a `cfg` holds for this build; other attributes do.
pub fn is_on(attribute: &Attribute) -> bool {
    !attribute.path().is_ident("cfg")
        || holds(&attribute.parse_args().unwrap_or_else(|error| panic!("a cfg of candle_nn: {error}")))
}

fn holds(condition: &Meta) -> bool {
    let name = |path: &syn::Path| path.get_ident().map(ToString::to_string).unwrap_or_default();
    let value_of = |variable: &str| std::env::var(variable.replace('-', "_").to_uppercase());
    match condition {
        Meta::Path(path) => value_of(&format!("CARGO_CFG_{}", name(path))).is_ok(),
        Meta::NameValue(pair) => {
            let syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(wanted), .. }) = &pair.value else {
                panic!("a cfg of candle_nn is not understood: {}", quote!(#condition));
            };
            let wanted = wanted.value();
            match name(&pair.path).as_str() {
                "feature" => value_of(&format!("CARGO_FEATURE_{wanted}")).is_ok(),
                key => value_of(&format!("CARGO_CFG_{key}"))
                    .is_ok_and(|values| values.split(',').any(|value| value == wanted)),
            }
        }
        Meta::List(list) => {
            let parser = syn::punctuated::Punctuated::<Meta, syn::Token![,]>::parse_terminated;
            let parts =
                list.parse_args_with(parser).unwrap_or_else(|error| panic!("a cfg of candle_nn: {error}"));
            match name(&list.path).as_str() {
                "all" => parts.iter().all(holds),
                "any" => parts.iter().any(holds),
                "not" => !parts.iter().any(holds),
                other => panic!("a cfg of candle_nn is not understood: {other}"),
            }
        }
    }
}
