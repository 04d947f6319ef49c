//! Types by their public paths, and where their fields and methods are written.

use crate::signatures::{Parameters, Scope, in_crate};
use crate::sources::{Path, Sources};
use quote::quote;
use syn::fold::Fold;
use syn::{
    GenericArgument, Generics, Ident, ItemImpl, Lifetime, PathArguments, Type, TypeParamBound, parse_quote,
};

/// A type by one of the paths that lead to it.
pub struct Subject<'a> {
    pub public: Path,
    pub definition: Path,
    /// How its ids begin.
    pub id: String,
    /// If it is an alias: its parameters, and what it gives those of the type that it stands for.
    pub alias: Option<(&'a Generics, Vec<GenericArgument>)>,
}

/// Where something of a type is written: the scope, its parameters, and what the type is there.
pub struct Place<'a> {
    pub scope: Scope<'a>,
    pub parameters: Parameters,
    pub own: Type,
}

/// A type with its own parameters.
pub fn itself(name: &Ident, generics: &Generics) -> Type {
    let (_, parameters, _) = generics.split_for_impl();
    parse_quote!(#name #parameters)
}

pub fn arguments_of(written: &Type) -> Vec<GenericArgument> {
    let Type::Path(path) = written else { return Vec::new() };
    match path.path.segments.last().map(|segment| &segment.arguments) {
        Some(PathArguments::AngleBracketed(arguments)) => arguments.args.iter().cloned().collect(),
        _ => Vec::new(),
    }
}

/// The type that an implementation is for, if it is written as a path.
pub fn type_of(sources: &Sources, module: &Path, item: &ItemImpl) -> Option<Path> {
    let Type::Path(path) = &*item.self_ty else { return None };
    let names: Vec<_> = path.path.segments.iter().map(|segment| segment.ident.to_string()).collect();
    Some(sources.definition(sources.absolute(module, &names)?))
}

/// `written` is the type as the module writes it, with `generics`.
pub fn place<'a>(
    sources: &'a Sources,
    subject: &Subject<'a>,
    module: &'a Path,
    generics: &Generics,
    written: &Type,
) -> Place<'a> {
    let mut scope = Scope::new(sources, module).with(generics);
    scope.renamed = Some((subject.definition.clone(), subject.public.clone()));
    let Some((alias, given)) = &subject.alias else {
        let mut parameters = scope.generics(generics);
        let anonymous: Lifetime = parse_quote!('own);
        let own = scope.naming(&anonymous).fold_type(written.clone());
        if quote!(#own).to_string().contains("'own") {
            parameters = parameters.and_lifetime(&anonymous);
        }
        scope.own = Some(own.clone());
        return Place { scope, parameters, own };
    };
    for (written, given) in arguments_of(written).into_iter().zip(given) {
        match (&written, given) {
            (GenericArgument::Lifetime(written), GenericArgument::Lifetime(given)) => {
                scope.fixed_lifetimes.insert(written.ident.to_string(), given.clone());
            }
            (GenericArgument::Type(written), GenericArgument::Type(given)) => {
                let name = quote!(#written).to_string();
                let parameter = generics.type_params().find(|parameter| parameter.ident == name);
                let parameter = parameter.unwrap_or_else(|| panic!("{}: not understood: {name}", subject.id));
                let bound = parameter.bounds.iter().find_map(|bound| match bound {
                    TypeParamBound::Trait(bound) => Some(scope.fold_path(bound.path.clone())),
                    _ => None,
                });
                scope.fixed.insert(name, (given.clone(), bound));
            }
            _ => panic!("{}: its arguments are not understood", subject.id),
        }
    }
    let parameters = scope.generics(generics).and(Scope::new(sources, module).generics(alias));
    let (_, arguments, _) = alias.split_for_impl();
    let path = in_crate("candle_quant_nn", &subject.public);
    let own: Type = parse_quote!(#path #arguments);
    scope.own = Some(own.clone());
    Place { scope, parameters, own }
}
