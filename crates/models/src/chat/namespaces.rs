//! Templates whose values could come to hold themselves.
//!
//! A `namespace` is the only value of Jinja that changes. One that holds itself has no end when it is printed or compared,
//! and the stack has one. Templates use namespaces for their attributes alone, so that any other use is refused.

use minijinja::machinery::{tokenize, Token};
use minijinja::syntax::SyntaxConfig;
use std::collections::BTreeSet;

const NAMESPACE: &str = "namespace";

/// Refuses a template in which a namespace could become a part of another value, also of itself.
///
/// It may only be made by `set name = namespace(..)`, and only be used as `name.attribute`, `name[..]` and `name is ..`.
pub(super) fn check(source: &str, syntax: &SyntaxConfig) -> Result<(), String> {
    // What can't be read is refused by whoever compiles it.
    let tokens: Vec<Token> =
        tokenize(source, false, syntax.clone()).map_while(Result::ok).map(|(token, _)| token).collect();
    let made: BTreeSet<&str> = tokens
        .windows(4)
        .filter_map(|window| match window {
            [Token::Ident("set"), Token::Ident(name), Token::Assign, Token::Ident(NAMESPACE)] => Some(*name),
            _ => None,
        })
        .collect();
    for (at, token) in tokens.iter().enumerate() {
        let Token::Ident(name) = token else { continue };
        let before = |distance: usize| at.checked_sub(distance).and_then(|at| tokens.get(at));
        if matches!(before(1), Some(Token::Dot)) {
            continue;
        }
        let is_right = match tokens.get(at + 1) {
            Some(Token::ParenOpen) if *name == NAMESPACE => {
                matches!((before(3), before(1)), (Some(Token::Ident("set")), Some(Token::Assign)))
                    && is_all_of_a_tag(tokens.get(at + 1..).unwrap_or_default())
            }
            Some(Token::Dot | Token::BracketOpen | Token::Assign | Token::Ident("is")) => *name != NAMESPACE,
            _ => *name != NAMESPACE && !made.contains(name),
        };
        if !is_right {
            return Err(format!("it uses the namespace `{name}` for more than its attributes"));
        }
    }
    Ok(())
}

/// Whether the parenthesis that these begin with is closed at the end of the tag.
fn is_all_of_a_tag(tokens: &[Token]) -> bool {
    let mut depth = 0usize;
    for (at, token) in tokens.iter().enumerate() {
        match token {
            Token::ParenOpen => depth += 1,
            Token::ParenClose => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth == 0 {
            return matches!(tokens.get(at + 1), Some(Token::BlockEnd));
        }
    }
    // Nobody can compile that.
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(source: &str) -> Result<(), String> {
        super::check(source, &SyntaxConfig::default())
    }

    #[test]
    fn attributes_may_be_read_and_set() {
        for source in [
            "{% set ns = namespace(found=false) %}{% set ns.found = ns.found or x.ns %}{{ ns['found'] }} ns",
            "{%- set ns=namespace() -%}{% if ns is defined and ns.x %}{{ 'ns' ~ f(ns=1) }}{% endif %}{# ns #}",
            "{{ message.namespace }}{% macro render(namespace_name) %}{% endmacro %}",
            "{% raw %}{{ namespace }}{% endraw %}",
            "{% set ns = namespace(",
        ] {
            assert_eq!(check(source), Ok(()), "{source}");
        }
    }

    #[test]
    fn nothing_may_hold_a_namespace() {
        for source in [
            "{% set ns = namespace() %}{% set ns.x = ns %}",
            "{% set ns = namespace() %}{% set ns.x = ns, 1 %}",
            "{% set ns = namespace() %}{% set ns.x = [ns.y, (ns)] %}",
            "{% set ns = namespace() %}{% for other in [ns] %}{% endfor %}",
            "{% set ns = namespace() %}{{ f(ns) }}",
            "{% set ns = namespace(a=namespace()) %}",
            "{% set f = namespace %}{% set ns = f() %}",
            "{% with ns = namespace() %}{% set ns.x = ns %}{% endwith %}",
            "{% set a, b = namespace(), 1 %}{% set a.x = a %}",
            "{% macro m(a=namespace()) %}{% set a.x = a %}{% endmacro %}{{ m() }}",
            "{% set ns = namespace() | list %}{{ ns | first }}",
            "{% set ns = namespace(), 1 %}{% set a = ns[0] %}{% set a.x = a %}",
            "{% set ns = namespace(a=(1)) or 2 %}",
            "{{ (namespace)() }}",
            "{% set ns = namespace() %}{% raw %}{{ '{% endraw %}{{ ns }}",
            "{% set ns = namespace() %}{{ '}}' ~ ns }}",
        ] {
            assert!(check(source).is_err(), "{source}");
        }
    }
}
