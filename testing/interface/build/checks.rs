//! What the compiler is asked about each public item.

use crate::count::Counts;
use crate::places::{Place, Subject, arguments_of, itself, place, type_of};
use crate::signatures::{Parameters, Scope, in_crate, wrapper};
use crate::sources::{Path, Sources};
use proc_macro2::TokenStream;
use quote::{format_ident, quote};
use std::collections::BTreeSet;
use syn::fold::Fold;
use syn::punctuated::Punctuated;
use syn::{Attribute, Fields, GenericParam, Generics, Ident, ImplItem, Item, ItemImpl};
use syn::{
    ItemEnum, ItemStruct, ItemTrait, ItemType, Lifetime, PathArguments, TraitItem, Type, TypeParamBound,
};
use syn::{Token, Visibility, parse_quote};

/// One question: the code compiles if our item is as candle_nn's.
pub struct Check {
    /// The item by the path of its definition, and what of it: the same for all paths that lead to it.
    pub id: String,
    /// The path under which a user finds it.
    pub public: String,
    pub code: TokenStream,
}

pub struct Checks<'a> {
    sources: &'a Sources,
    pub checks: Vec<Check>,
    /// Items that have a check: keyword and path.
    seen: BTreeSet<(&'static str, String)>,
}

impl<'a> Checks<'a> {
    /// Checks of all items.
    pub fn of(sources: &'a Sources) -> Self {
        let mut checks = Self { sources, checks: Vec::new(), seen: BTreeSet::new() };
        let exports = sources.exports();
        for (public, definition) in &exports {
            checks.export(public, definition);
        }
        let exported: BTreeSet<_> = exports.into_values().collect();
        for (module, item) in sources.impls() {
            checks.impl_for_a_foreign_type(module, item, &exported);
        }
        checks
    }

    /// How many public items have a check.
    pub fn counts(&self) -> Counts {
        let mut counts = Counts::new();
        for (keyword, _) in &self.seen {
            *counts.entry(keyword).or_default() += 1;
        }
        counts
    }

    fn push(&mut self, id: String, public: &[String], code: TokenStream) {
        self.checks.push(Check { id, public: public.join("::").replacen("crate", "candle_nn", 1), code });
    }

    /// The name of the next check.
    fn name(&self) -> Ident {
        format_ident!("check_{}", self.checks.len())
    }

    fn export(&mut self, public: &Path, definition: &Path) {
        let sources = self.sources;
        let Some(item) = sources.item(definition) else {
            return self.identical(definition.join("::"), public, definition);
        };
        let id = definition[1..].join("::");
        let (module, _) =
            sources.modules.get_key_value(&definition[..definition.len() - 1]).expect("its module");
        let mut subject =
            Subject { public: public.clone(), definition: definition.clone(), id: id.clone(), alias: None };
        let keyword = match item {
            Item::Fn(item) => {
                let callee = in_crate("candle_quant_nn", public);
                let scope = Scope::new(sources, module);
                let code = wrapper(&self.name(), &scope, &Parameters::default(), &item.sig, quote!(#callee));
                self.push(id.clone(), public, code);
                "fn"
            }
            Item::Struct(item) => {
                let place =
                    place(sources, &subject, module, &item.generics, &itself(&item.ident, &item.generics));
                self.fields(&subject, &place, item);
                self.derives(&subject, &place, &item.attrs);
                self.impls(&subject);
                self.auto_traits(&subject, &item.generics);
                "struct"
            }
            Item::Enum(item) => {
                let place =
                    place(sources, &subject, module, &item.generics, &itself(&item.ident, &item.generics));
                self.variants(&subject, &place, item);
                self.derives(&subject, &place, &item.attrs);
                self.impls(&subject);
                self.auto_traits(&subject, &item.generics);
                "enum"
            }
            Item::Trait(item) => {
                self.trait_items(&subject, module, item);
                "trait"
            }
            Item::Type(item) => {
                self.impls(&subject);
                self.auto_traits(&subject, &item.generics);
                self.aliased(&mut subject, module, item);
                "type"
            }
            Item::Const(_) => "const",
            Item::Static(_) => "static",
            _ => unreachable!("other items have no name"),
        };
        if keyword != "fn" {
            self.identical(format!("{id}: candle_nn's own"), public, public);
        }
        self.seen.insert((keyword, id));
    }

    /// That `public` is the item `original` itself: a name that two globs bring is an error if they disagree.
    fn identical(&mut self, id: String, public: &Path, original: &[String]) {
        let name = self.name();
        let (original, ours) = (in_crate("candle_nn", original), in_crate("candle_quant_nn", public));
        let code = quote! {
            #[deny(ambiguous_glob_imports)]
            mod #name {
                mod original { pub use #original as Item; }
                mod ours { pub use #ours as Item; }
                use original::*;
                use ours::*;
                fn both() { use self::Item as _; }
            }
        };
        self.push(id, public, code);
    }

    /// Public fields, and the expression that makes a value if all are public.
    fn fields(&mut self, subject: &Subject<'a>, place: &Place<'a>, item: &ItemStruct) {
        let is_public = |field: &&syn::Field| matches!(field.vis, Visibility::Public(_));
        for (position, field) in item.fields.iter().enumerate().filter(|(_, field)| is_public(field)) {
            let member = match &field.ident {
                Some(name) => syn::Member::Named(name.clone()),
                None => syn::Member::from(position),
            };
            let parameters = place.parameters.clone().and_lifetime(&parse_quote!('this));
            let (name, list, clause, own) = (self.name(), parameters.list(), parameters.clause(), &place.own);
            let field = place.scope.clone().fold_type(field.ty.clone());
            let code = quote! {
                fn #name #list(this: &'this mut #own) -> &'this mut #field #clause { &mut this.#member }
            };
            let id = format!("{}.{}", subject.id, quote!(#member));
            self.push(id, &subject.public, code);
        }
        if subject.alias.is_none() && item.fields.iter().all(|field| is_public(&field)) {
            let path = in_crate("candle_quant_nn", &subject.public);
            self.construct(
                format!("{}: its fields", subject.id),
                subject,
                place,
                &item.fields,
                quote!(#path),
            );
        }
    }

    /// A function of fields that makes a value of them.
    fn construct(
        &mut self,
        id: String,
        subject: &Subject<'a>,
        place: &Place<'a>,
        fields: &Fields,
        path: TokenStream,
    ) {
        let (name, list, clause) = (self.name(), place.parameters.list(), place.parameters.clause());
        let own = &place.own;
        let types = fields.iter().map(|field| place.scope.clone().fold_type(field.ty.clone()));
        let arguments: Vec<_> = (0..fields.len()).map(|position| format_ident!("field_{position}")).collect();
        let members = fields.members();
        let value = match fields {
            Fields::Unit => path,
            _ => quote!(#path { #(#members: #arguments),* }),
        };
        let code = quote!(fn #name #list(#(#arguments: #types),*) -> #own #clause { #value });
        self.push(id, &subject.public, code);
    }

    /// All variants and no others, each with its fields.
    fn variants(&mut self, subject: &Subject<'a>, place: &Place<'a>, item: &ItemEnum) {
        let path = in_crate("candle_quant_nn", &subject.public);
        let (name, list, clause) = (self.name(), place.parameters.list(), place.parameters.clause());
        let own = &place.own;
        let variants = item.variants.iter().map(|variant| &variant.ident);
        let code = quote! {
            fn #name #list(value: #own) #clause { match value { #(#path::#variants { .. } => {})* } }
        };
        self.push(format!("{}: its variants", subject.id), &subject.public, code);
        for variant in &item.variants {
            let ident = &variant.ident;
            let id = format!("{}::{ident}", subject.id);
            self.construct(id, subject, place, &variant.fields, quote!(#path::#ident));
        }
    }

    fn derives(&mut self, subject: &Subject<'a>, place: &Place<'a>, attributes: &[Attribute]) {
        for attribute in attributes.iter().filter(|attribute| attribute.path().is_ident("derive")) {
            let traits = attribute.parse_args_with(Punctuated::<syn::Path, Token![,]>::parse_terminated);
            for derived in traits.expect("a list of traits") {
                let is_generic =
                    place.parameters.parameters.iter().any(|one| matches!(one, GenericParam::Type(_)));
                assert!(!is_generic, "{}: this test has to learn of it", subject.id);
                let written = quote!(#derived).to_string().replace(' ', "");
                let derived = match written.as_str() {
                    "Debug" => parse_quote!(::std::fmt::Debug),
                    "Hash" => parse_quote!(::std::hash::Hash),
                    "serde::Deserialize" => parse_quote!(::serde::de::DeserializeOwned),
                    "serde::Serialize" => parse_quote!(::serde::Serialize),
                    _ => derived,
                };
                self.implements(format!("{}: {written}", subject.id), &subject.public, place, &derived);
            }
        }
    }

    /// That the type of `place` has a trait.
    fn implements(&mut self, id: String, public: &[String], place: &Place<'a>, implemented: &syn::Path) {
        let (name, list, clause) = (self.name(), place.parameters.list(), place.parameters.clause());
        let own = &place.own;
        self.push(id, public, quote!(fn #name #list(value: #own) -> impl #implemented #clause { value }));
    }

    /// Methods and traits of a type.
    fn impls(&mut self, subject: &Subject<'a>) {
        let sources = self.sources;
        for (module, item) in sources.impls() {
            if type_of(sources, module, item).as_ref() != Some(&subject.definition) {
                continue;
            }
            let place = place(sources, subject, module, &item.generics, &item.self_ty);
            match &item.trait_ {
                Some((implemented, _)) => {
                    self.trait_impl(&subject.id, &subject.public, &place, implemented, item)
                }
                None => item.items.iter().for_each(|item| self.method(subject, &place, item)),
            }
        }
    }

    fn method(&mut self, subject: &Subject<'a>, place: &Place<'a>, item: &ImplItem) {
        let (name, own) = (self.name(), &place.own);
        match item {
            ImplItem::Fn(item) if matches!(item.vis, Visibility::Public(_)) => {
                let method = &item.sig.ident;
                let callee = quote!(<#own>::#method);
                let id = format!("{}::{method}", subject.id);
                if subject.alias.is_none() {
                    self.seen.insert(("fn", id.clone()));
                }
                let code = wrapper(&name, &place.scope, &place.parameters, &item.sig, callee);
                self.push(id, &subject.public, code);
            }
            ImplItem::Fn(_) => {}
            other => panic!("{}: this test has to learn of {}", subject.id, quote!(#other)),
        }
    }

    /// That a type has a trait, with the same associated types.
    fn trait_impl(
        &mut self,
        id: &str,
        public: &[String],
        place: &Place<'a>,
        implemented: &syn::Path,
        item: &ItemImpl,
    ) {
        let mut scope = place.scope.clone();
        let mut implemented = scope.fold_path(implemented.clone());
        let id = format!("{id}: {}", quote!(#implemented).to_string().replace(' ', ""));
        for item in &item.items {
            let ImplItem::Type(associated) = item else { continue };
            let (name, fixed) = (&associated.ident, scope.fold_type(associated.ty.clone()));
            let last = implemented.segments.last_mut().expect("a path has segments");
            match &mut last.arguments {
                PathArguments::AngleBracketed(arguments) => arguments.args.push(parse_quote!(#name = #fixed)),
                arguments => *arguments = PathArguments::AngleBracketed(parse_quote!(<#name = #fixed>)),
            }
        }
        self.implements(id, public, place, &implemented);
    }

    /// A trait of candle_nn for a type of another crate, or for all types.
    fn impl_for_a_foreign_type(&mut self, module: &'a Path, item: &'a ItemImpl, exported: &BTreeSet<Path>) {
        let sources = self.sources;
        let Some((implemented, _)) = &item.trait_ else { return };
        let names: Vec<_> = implemented.segments.iter().map(|segment| segment.ident.to_string()).collect();
        let of_trait = sources.absolute(module, &names).map(|path| sources.definition(path));
        let is_of_candles_type = type_of(sources, module, item).is_some_and(|path| path[0] == "crate");
        let Some(of_trait) = of_trait.filter(|path| path[0] == "crate" && exported.contains(path)) else {
            return;
        };
        if is_of_candles_type {
            return;
        }
        let foreign =
            Subject { public: Path::new(), definition: Path::new(), id: String::new(), alias: None };
        let place = place(sources, &foreign, module, &item.generics, &item.self_ty);
        let own = &place.own;
        let id = quote!(#own).to_string().replace(' ', "");
        self.trait_impl(&id, &of_trait, &place, implemented, item);
    }

    /// Traits that no source mentions: whatever the compiler gives candle_nn's type ours has, too.
    fn auto_traits(&mut self, subject: &Subject<'a>, generics: &Generics) {
        if generics.type_params().next().is_some() {
            return;
        }
        let arguments: Vec<Lifetime> = generics.lifetimes().map(|_| parse_quote!('static)).collect();
        let original = in_crate("candle_nn", &subject.public);
        let ours = in_crate("candle_quant_nn", &subject.public);
        let list = quote!(<#(#arguments),*>);
        let checks = ["Send", "Sync", "Unpin", "UnwindSafe", "RefUnwindSafe"].map(|name| {
            let (name, text) = (format_ident!("{name}"), format!("{name}, as candle_nn's"));
            quote! {
                const _: () = assert!(
                    !::interface::auto_traits::Is::<#original #list>::#name
                        || ::interface::auto_traits::Is::<#ours #list>::#name,
                    #text
                );
            }
        });
        let code = quote! {
            const _: () = {
                #[allow(unused_imports)]
                use ::interface::auto_traits::No;
                #(#checks)*
            };
        };
        self.push(format!("{}: auto traits", subject.id), &subject.public, code);
    }

    /// What a trait promises, and what it asks of who implements it.
    fn trait_items(&mut self, subject: &Subject<'a>, module: &'a Path, item: &ItemTrait) {
        assert!(item.generics.params.is_empty(), "{}: this test has to learn of its parameters", subject.id);
        let path = in_crate("candle_quant_nn", &subject.public);
        let mut scope = Scope::new(self.sources, module);
        let parameters = Parameters { parameters: vec![parse_quote!(T: #path)], conditions: Vec::new() };
        let mut required = Vec::new();
        for item in &item.items {
            match item {
                TraitItem::Fn(item) => {
                    let name = &item.sig.ident;
                    let mut inside = scope.clone();
                    inside.parameters.push("T".into());
                    inside.own = Some(parse_quote!(T));
                    inside.own_trait = Some(path.clone());
                    let callee = quote!(<T as #path>::#name);
                    let code = wrapper(&self.name(), &inside, &parameters, &item.sig, callee);
                    self.push(format!("{}::{name}", subject.id), &subject.public, code);
                    if item.default.is_none() {
                        let signature = scope.with(&item.sig.generics).fold_signature(item.sig.clone());
                        required.push(quote!(#signature { unimplemented!() }));
                    }
                }
                TraitItem::Type(item) => {
                    let name = &item.ident;
                    required.push(quote!(type #name = ();));
                }
                other => panic!("{}: this test has to learn of {}", subject.id, quote!(#other)),
            }
        }
        let own = Place { scope: scope.clone(), parameters, own: parse_quote!(T) };
        for bound in &item.supertraits {
            let TypeParamBound::Trait(bound) = bound else { continue };
            let super_trait = scope.fold_path(bound.path.clone());
            let id = format!("{}: {}", subject.id, quote!(#super_trait).to_string().replace(' ', ""));
            self.implements(id, &subject.public, &own, &super_trait);
        }
        let name = self.name();
        let code = quote! {
            mod #name {
                struct Implementor;
                impl #path for Implementor { #(#required)* }
            }
        };
        self.push(format!("{}: what it requires", subject.id), &subject.public, code);
    }

    /// Under an alias all that the type has that it stands for.
    fn aliased(&mut self, subject: &mut Subject<'a>, module: &'a Path, item: &'a ItemType) {
        let sources = self.sources;
        let Type::Path(target) = &*item.ty else { return };
        let names: Vec<_> = target.path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        let Some(definition) = sources.absolute(module, &names).map(|path| sources.definition(path)) else {
            return;
        };
        let Some(Item::Struct(target_item)) = sources.item(&definition) else { return };
        let scope = Scope::new(sources, module).with(&item.generics);
        let arguments =
            arguments_of(&item.ty).into_iter().map(|one| scope.clone().fold_generic_argument(one));
        subject.alias = Some((&item.generics, arguments.collect()));
        let (target_module, _) =
            sources.modules.get_key_value(&definition[..definition.len() - 1]).expect("its module");
        let alias = std::mem::replace(&mut subject.definition, definition);
        let written = itself(&target_item.ident, &target_item.generics);
        let place = place(sources, subject, target_module, &target_item.generics, &written);
        self.fields(subject, &place, target_item);
        self.impls(subject);
        subject.definition = alias;
    }
}
