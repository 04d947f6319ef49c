//! Short English stories drawn from a small grammar.
//!
//! A template is text with two kinds of marks: `[a|b|c]` stands for one of its alternatives, and `{key}` for
//! a word of this story (`{hero}`, `{toy}`, ...) or for a rule of [`RULES`], which is itself a template.
//! `{Key}` is the same with a capital letter. Words are drawn once per story, so names, pronouns and objects
//! stay the same throughout; rules are drawn anew at each use.

use crate::plots::{PLOTS, RULES};
use anyhow::{bail, Context, Result};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use std::collections::HashMap;

const GIRLS: &[&str] = &["Lily", "Mia", "Anna", "Zoe", "Ella", "Nora", "Rose", "Emma", "Lucy", "Sue"];
const BOYS: &[&str] = &["Tom", "Ben", "Sam", "Max", "Leo", "Jack", "Tim", "Finn", "Adam", "Dan"];
const SHE_ANIMALS: &[&str] = &["Dot", "Fern", "Tilly", "Hazel", "Coco", "Penny"];
const HE_ANIMALS: &[&str] = &["Pip", "Gus", "Rusty", "Bruno", "Momo", "Otto"];
const ANIMALS: &[&str] =
    &["rabbit", "fox", "bear", "mouse", "duck", "cat", "dog", "frog", "owl", "turtle", "squirrel", "hen"];
const TRAITS: &[&str] = &[
    "little", "small", "kind", "clever", "happy", "curious", "shy", "brave", "young", "gentle", "quiet",
    "funny",
];
const COLORS: &[&str] =
    &["red", "blue", "green", "yellow", "pink", "white", "shiny", "purple", "golden", "tiny"];
const TOYS: &[&str] =
    &["ball", "boat", "hat", "drum", "book", "scarf", "bell", "doll", "train", "box", "ring", "coat"];
const FLYING: &[&str] = &["kite", "balloon", "ball", "hat", "paper plane", "ribbon"];
const PLACES: &[(&str, &str)] = &[
    ("in", "park"),
    ("in", "garden"),
    ("in", "forest"),
    ("by", "river"),
    ("by", "lake"),
    ("on", "farm"),
    ("in", "meadow"),
    ("at", "beach"),
    ("on", "hill"),
    ("in", "village"),
];
const FOODS: &[&str] = &["apple", "cake", "pie", "pear", "cookie", "sandwich", "carrot", "bun", "orange"];
const PARENTS: &[(&str, bool)] = &[("mom", true), ("dad", false), ("grandma", true), ("grandpa", false)];

/// Stories without end, the same ones for the same seed.
pub struct Stories {
    rng: StdRng,
}

impl Stories {
    pub fn new(seed: u64) -> Self {
        Self { rng: StdRng::seed_from_u64(seed) }
    }

    /// One story: a single paragraph without line breaks.
    pub fn tell(&mut self) -> Result<String> {
        let rng = &mut self.rng;
        let plot = PLOTS.choose(rng).context("no plots")?;
        let mut words = cast(rng)?;
        for (key, template) in plot.words {
            let value = expand(template, &words, rng)?;
            words.insert((*key).into(), value);
        }
        let mut parts = Vec::new();
        for template in plot.parts {
            let part = expand(template, &words, rng)?;
            if !part.trim().is_empty() {
                parts.push(part.trim().to_string());
            }
        }
        Ok(parts.join(" "))
    }
}

type Words = HashMap<String, String>;

/// Draws the words that every plot may use: who, what and where.
fn cast(rng: &mut StdRng) -> Result<Words> {
    let mut words = Words::new();
    let (hero, _) = person(rng, "", &mut words, None)?;
    let (friend, human) = person(rng, "f", &mut words, Some(&hero))?;
    // "Gus the frog", but never "Tom the boy".
    let full = if human {
        format!("{} friend {friend}", words["his"])
    } else {
        format!("{friend} the {}", words["fkind"])
    };
    words.insert("friend_full".into(), full);
    words.insert("hero".into(), hero);
    words.insert("friend".into(), friend);

    // The story happens elsewhere than at home.
    let two_places: Vec<_> = PLACES.sample(rng, 2).collect();
    for (key, (preposition, place)) in ["place", "home_place"].into_iter().zip(two_places) {
        words.insert(key.into(), (*place).into());
        words.insert(format!("in_{key}"), format!("{preposition} the {place}"));
    }
    let color = pick(COLORS, rng)?;
    words.insert("color".into(), color.to_string());
    words.insert("toy".into(), format!("{color} {}", pick(TOYS, rng)?));
    words.insert("flying".into(), format!("{color} {}", pick(FLYING, rng)?));
    words.insert("food".into(), (*pick(FOODS, rng)?).into());
    words.insert("trait".into(), (*pick(TRAITS, rng)?).into());
    let (parent, she) = pick(PARENTS, rng)?;
    words.insert("parent".into(), (*parent).into());
    pronouns("p", *she, &mut words);
    for key in ["trait", "toy", "flying", "fkind"] {
        let phrase = with_article(&words[key]);
        words.insert(format!("a_{key}"), phrase);
    }
    Ok(words)
}

/// Draws a child or an animal not named `other`, and returns the name and whether it is a child.
fn person(rng: &mut StdRng, prefix: &str, words: &mut Words, other: Option<&str>) -> Result<(String, bool)> {
    loop {
        let human = rng.random_bool(0.5);
        let she = rng.random_bool(0.5);
        let names = match (human, she) {
            (true, true) => GIRLS,
            (true, false) => BOYS,
            (false, true) => SHE_ANIMALS,
            (false, false) => HE_ANIMALS,
        };
        let name = pick(names, rng)?.to_string();
        let kind = match (human, she) {
            (true, true) => "girl",
            (true, false) => "boy",
            _ => pick(ANIMALS, rng)?,
        };
        if other == Some(name.as_str()) {
            continue;
        }
        words.insert(format!("{prefix}kind"), kind.into());
        pronouns(prefix, she, words);
        return Ok((name, human));
    }
}

fn pronouns(prefix: &str, she: bool, words: &mut Words) {
    let keys = ["he", "him", "his", "himself"];
    let forms = if she { ["she", "her", "her", "herself"] } else { keys };
    for (key, form) in keys.iter().zip(forms) {
        words.insert(format!("{prefix}{key}"), form.into());
    }
}

fn pick<'a, T>(list: &'a [T], rng: &mut StdRng) -> Result<&'a T> {
    list.choose(rng).context("empty word list")
}

fn with_article(phrase: &str) -> String {
    let article = if phrase.starts_with(['a', 'e', 'i', 'o', 'u']) { "an" } else { "a" };
    format!("{article} {phrase}")
}

fn capitalized(text: &str) -> String {
    let mut chars = text.chars();
    match chars.next() {
        Some(first) => first.to_uppercase().chain(chars).collect(),
        None => String::new(),
    }
}

/// Replaces every mark of `template`.
fn expand(template: &str, words: &Words, rng: &mut StdRng) -> Result<String> {
    let mut out = String::new();
    let mut rest = template;
    while let Some(at) = rest.find(['[', '{']) {
        out.push_str(&rest[..at]);
        let (inside, after) = split_mark(&rest[at..])?;
        if rest[at..].starts_with('{') {
            out.push_str(&look_up(inside, words, rng)?);
        } else {
            let choices = alternatives(inside);
            out.push_str(&expand(pick(&choices, rng)?, words, rng)?);
        }
        rest = after;
    }
    out.push_str(rest);
    Ok(out)
}

fn look_up(key: &str, words: &Words, rng: &mut StdRng) -> Result<String> {
    let lower = key.to_lowercase();
    let text = if let Some(word) = words.get(&lower) {
        word.clone()
    } else if let Some((_, rule)) = RULES.iter().find(|(name, _)| *name == lower) {
        expand(rule, words, rng)?
    } else {
        bail!("the grammar has no word or rule {lower:?}");
    };
    Ok(if key == lower { text } else { capitalized(&text) })
}

/// Splits `"[inside]after"` or `"{inside}after"` at the bracket that closes the first one.
fn split_mark(text: &str) -> Result<(&str, &str)> {
    let mut depth = 0;
    for (at, c) in text.char_indices() {
        match c {
            '[' | '{' => depth += 1,
            ']' | '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Ok((&text[1..at], &text[at + 1..]));
        }
    }
    bail!("unclosed mark in template: {text:?}")
}

/// Splits at every `|` outside inner brackets.
fn alternatives(text: &str) -> Vec<&str> {
    let (mut depth, mut start, mut found) = (0, 0, Vec::new());
    for (at, c) in text.char_indices() {
        match c {
            '[' | '{' => depth += 1,
            ']' | '}' => depth -= 1,
            '|' if depth == 0 => {
                found.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    found.push(&text[start..]);
    found
}
