//! candle_nn's types and signatures, written so that they mean the same outside of its modules.

use crate::sources::{Path, Sources};
use proc_macro2::TokenStream;
use quote::{format_ident, quote};
use std::collections::BTreeMap;
use syn::fold::{self, Fold};
use syn::{
    FnArg, GenericParam, Generics, Ident, Lifetime, ReceiverKind, ReturnType, Safety, Signature, Type,
};
use syn::{WherePredicate, parse_quote};

/// Writes paths of one module as paths from the roots of crates.
#[derive(Clone)]
pub struct Scope<'a> {
    pub sources: &'a Sources,
    /// The module whose imports hold.
    pub module: &'a Path,
    /// What `Self` is.
    pub own: Option<Type>,
    /// Where `Self::Name` is defined, if by a trait.
    pub own_trait: Option<syn::Path>,
    /// Of one item the path by which it is named: an item may be public under several.
    pub renamed: Option<(Path, Path)>,
    /// Parameters in scope.
    pub parameters: Vec<String>,
    /// What stands for parameters of a type that an alias fixes, with the trait that bounds each.
    pub fixed: BTreeMap<String, (Type, Option<syn::Path>)>,
    pub fixed_lifetimes: BTreeMap<String, Lifetime>,
    /// What lifetimes are called that have no name.
    pub anonymous: Option<Lifetime>,
}

impl<'a> Scope<'a> {
    pub fn new(sources: &'a Sources, module: &'a Path) -> Self {
        Self {
            sources,
            module,
            own: None,
            own_trait: None,
            renamed: None,
            parameters: Vec::new(),
            fixed: BTreeMap::new(),
            fixed_lifetimes: BTreeMap::new(),
            anonymous: None,
        }
    }

    /// The scope with the parameters of `generics`.
    pub fn with(&self, generics: &Generics) -> Self {
        let mut scope = self.clone();
        scope.parameters.extend(generics.type_params().map(|parameter| parameter.ident.to_string()));
        scope.parameters.extend(generics.const_params().map(|parameter| parameter.ident.to_string()));
        scope
    }

    /// The scope in which lifetimes without a name have this one.
    pub fn naming(&self, anonymous: &Lifetime) -> Self {
        Self { anonymous: Some(anonymous.clone()), ..self.clone() }
    }

    /// Parameters, without those that are fixed and without defaults, and conditions on them.
    pub fn generics(&self, generics: &Generics) -> Parameters {
        let mut scope = self.clone();
        let is_free = |parameter: &&GenericParam| match parameter {
            GenericParam::Lifetime(parameter) => {
                !self.fixed_lifetimes.contains_key(&parameter.lifetime.ident.to_string())
            }
            GenericParam::Type(parameter) => !self.fixed.contains_key(&parameter.ident.to_string()),
            GenericParam::Const(_) => true,
        };
        let parameters = generics.params.iter().filter(is_free).map(|parameter| {
            let mut parameter = scope.fold_generic_param(parameter.clone());
            if let GenericParam::Type(parameter) = &mut parameter {
                parameter.default = None;
            }
            parameter
        });
        let parameters = parameters.collect();
        let conditions = generics.where_clause.iter().flat_map(|clause| &clause.predicates);
        let conditions = conditions.map(|condition| scope.fold_where_predicate(condition.clone())).collect();
        Parameters { parameters, conditions }
    }
}

/// Parameters of a function that checks something.
#[derive(Clone, Default)]
pub struct Parameters {
    pub parameters: Vec<GenericParam>,
    pub conditions: Vec<WherePredicate>,
}

impl Parameters {
    /// These and others; lifetimes come first.
    pub fn and(mut self, other: Parameters) -> Self {
        self.parameters.extend(other.parameters);
        self.conditions.extend(other.conditions);
        self.parameters.sort_by_key(|parameter| !matches!(parameter, GenericParam::Lifetime(_)));
        self
    }

    pub fn and_lifetime(self, lifetime: &Lifetime) -> Self {
        self.and(Self { parameters: vec![parse_quote!(#lifetime)], conditions: Vec::new() })
    }

    pub fn list(&self) -> TokenStream {
        let parameters = &self.parameters;
        quote!(<#(#parameters),*>)
    }

    pub fn clause(&self) -> TokenStream {
        let conditions = &self.conditions;
        if conditions.is_empty() { TokenStream::new() } else { quote!(where #(#conditions),*) }
    }
}

impl Fold for Scope<'_> {
    fn fold_type(&mut self, written: Type) -> Type {
        let Type::Path(path) = &written else { return fold::fold_type(self, written) };
        let segments = &path.path.segments;
        let (Some(first), None) = (segments.first(), &path.qself) else {
            return fold::fold_type(self, written);
        };
        let first = first.ident.to_string();
        let (stands_for, of_trait) = match self.fixed.get(&first) {
            Some((fixed, bound)) => (Some(fixed), bound),
            None if first == "Self" => (self.own.as_ref(), &self.own_trait),
            None => (None, &None),
        };
        let rest = segments.iter().skip(1);
        match (stands_for, of_trait, segments.len()) {
            (None, ..) => fold::fold_type(self, written),
            (Some(stands_for), _, 1) => stands_for.clone(),
            (Some(stands_for), Some(of_trait), _) => parse_quote!(<#stands_for as #of_trait>#(::#rest)*),
            (Some(stands_for), None, _) => parse_quote!(<#stands_for>#(::#rest)*),
        }
    }

    fn fold_path(&mut self, path: syn::Path) -> syn::Path {
        let path = fold::fold_path(self, path);
        let names: Vec<_> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        let is_its_own = names[0] == "Self" || self.parameters.contains(&names[0]);
        if path.leading_colon.is_some() || is_its_own {
            return path;
        }
        let Some(absolute) = self.sources.absolute(self.module, &names) else { return path };
        let mut resolved = match &self.renamed {
            Some((definition, public)) if self.sources.definition(absolute.clone()) == *definition => {
                in_crate("candle_quant_nn", public)
            }
            _ => in_crate("candle_quant_nn", &absolute),
        };
        if let (Some(resolved), Some(written)) = (resolved.segments.last_mut(), path.segments.last()) {
            resolved.arguments = written.arguments.clone();
        }
        resolved
    }

    fn fold_lifetime(&mut self, lifetime: Lifetime) -> Lifetime {
        match &self.anonymous {
            Some(name) if lifetime.ident == "_" => name.clone(),
            _ => self.fixed_lifetimes.get(&lifetime.ident.to_string()).cloned().unwrap_or(lifetime),
        }
    }

    fn fold_type_reference(&mut self, mut reference: syn::TypeReference) -> syn::TypeReference {
        if reference.lifetime.is_none() {
            reference.lifetime = self.anonymous.clone();
        }
        fold::fold_type_reference(self, reference)
    }

    /// Lifetimes without a name in `Fn(&T)` are of the closure's caller.
    fn fold_parenthesized_generic_arguments(
        &mut self,
        arguments: syn::ParenthesizedGenericArguments,
    ) -> syn::ParenthesizedGenericArguments {
        fold::fold_parenthesized_generic_arguments(&mut Scope { anonymous: None, ..self.clone() }, arguments)
    }
}

/// A path as it is written anywhere; `us` is the crate that takes candle_nn's place.
pub fn in_crate(us: &str, path: &[String]) -> syn::Path {
    let names = path.iter().map(|name| if name == "crate" { us } else { name });
    let text: String = names.map(|name| format!("::{name}")).collect();
    syn::parse_str(&text).unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// A function with candle_nn's signature that calls ours, called `callee`. The result is in a tuple, where the
/// compiler converts nothing.
pub fn wrapper(
    name: &Ident,
    scope: &Scope,
    outer: &Parameters,
    signature: &Signature,
    callee: TokenStream,
) -> TokenStream {
    assert!(
        signature.asyncness.is_none() && signature.variadic.is_none(),
        "{name}: this test has to learn of it"
    );
    let mut scope = scope.with(&signature.generics);
    let mut parameters = outer.clone().and(scope.generics(&signature.generics));
    let this: Lifetime = parse_quote!('this);
    let mut output = scope.clone();
    let (mut arguments, mut names) = (Vec::new(), Vec::new());
    for (position, argument) in signature.inputs.iter().enumerate() {
        let name = format_ident!("argument_{position}");
        let own = scope.own.clone();
        let argument: Type = match argument {
            FnArg::Typed(argument) => scope.fold_type((*argument.ty).clone()),
            FnArg::Receiver(receiver) => match &receiver.kind {
                ReceiverKind::Value => parse_quote!(#own),
                ReceiverKind::Reference(_, lifetime, mutability) => {
                    let lifetime = lifetime.clone().unwrap_or_else(|| {
                        parameters = parameters.clone().and_lifetime(&this);
                        output = output.naming(&this);
                        this.clone()
                    });
                    parse_quote!(&#lifetime #mutability #own)
                }
                ReceiverKind::Typed(_, written) => scope.fold_type((**written).clone()),
                _ => panic!("{name}: this test has to learn of another kind of receiver"),
            },
        };
        arguments.push(quote!(#name: #argument));
        names.push(name);
    }
    let output = match &signature.output {
        ReturnType::Default => quote!(()),
        ReturnType::Type(_, written) => {
            let written = output.fold_type((**written).clone());
            quote!(#written)
        }
    };
    let explicit: Vec<_> = signature
        .generics
        .params
        .iter()
        .filter_map(|parameter| match parameter {
            GenericParam::Lifetime(_) => None,
            GenericParam::Type(parameter) => Some(&parameter.ident),
            GenericParam::Const(parameter) => Some(&parameter.ident),
        })
        .collect();
    let turbofish = if explicit.is_empty() { quote!() } else { quote!(::<#(#explicit),*>) };
    let constness = &signature.constness;
    let call = quote!(#callee #turbofish(#(#names),*));
    let (unsafety, call) = match signature.safety {
        Safety::Unsafe(_) => (quote!(unsafe), quote!(unsafe { #call })),
        _ => (quote!(), call),
    };
    let (list, clause) = (parameters.list(), parameters.clause());
    quote! {
        #constness #unsafety fn #name #list(#(#arguments),*) -> (#output,) #clause {
            let result = (#call,);
            result
        }
    }
}
