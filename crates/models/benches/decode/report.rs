//! Figures, their lines of JSON, and one table.

use crate::files::Files;
use crate::options::Options;
use anyhow::{bail, Result};
use serde::Serialize;
use serde_json::json;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;

/// What is measured: decode behind 1024 tokens of one model, say.
#[derive(Clone, Serialize)]
pub struct Case {
    pub kind: &'static str,
    pub model: &'static str,
    pub bits: usize,
    pub case: String,
}

/// The median of one library's rounds.
#[derive(Serialize)]
pub struct Figure {
    #[serde(flatten)]
    pub case: Case,
    pub library: &'static str,
    pub unit: &'static str,
    pub median: f64,
    pub least: f64,
    pub most: f64,
    pub rounds: usize,
    pub threads: usize,
}

impl Case {
    pub fn new(kind: &'static str, files: &Files, case: usize) -> Self {
        Self { kind, model: files.shape.name, bits: files.bits, case: case.to_string() }
    }

    pub fn figure(&self, library: &'static str, unit: &'static str, values: &[f64]) -> Figure {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let at = |index: usize| sorted.get(index).copied().unwrap_or(f64::NAN);
        Figure {
            case: self.clone(),
            library,
            unit,
            median: (at(sorted.len() / 2) + at(sorted.len().saturating_sub(1) / 2)) / 2.,
            least: at(0),
            most: at(sorted.len().saturating_sub(1)),
            rounds: sorted.len(),
            threads: rayon::current_num_threads(),
        }
    }
}

/// A figure of the machine, not of a model.
pub fn figure(kind: &'static str, unit: &'static str, values: &[f64]) -> Figure {
    Case { kind, model: "", bits: 0, case: String::new() }.figure("machine", unit, values)
}

/// Collects figures, and writes them as they come.
pub struct Report {
    json: Option<File>,
    paced: bool,
    figures: Vec<Figure>,
}

impl Report {
    pub fn new(options: &Options) -> Result<Self> {
        let json = options.json.as_ref().map(File::create).transpose()?;
        Ok(Self { json, paced: options.paced, figures: Vec::new() })
    }

    pub fn write(&mut self, figure: Figure) -> Result<()> {
        let line = serde_json::to_string(&figure)?;
        if let Some(json) = &mut self.json {
            writeln!(json, "{line}")?;
        }
        if self.paced {
            println!("{line}");
        } else {
            let Case { kind, model, bits, case } = &figure.case;
            let Figure { library, unit, median, .. } = &figure;
            eprintln!("{kind} {model} {bits} {case}: {library} {median:.4} {unit}");
        }
        self.figures.push(figure);
        Ok(())
    }

    /// Says to a program that paces this one what comes.
    pub fn begin(&self, case: &Case, unit: &str, rounds: u32) -> Result<()> {
        self.say(&json!({"event": "begin", "case": case, "unit": unit, "rounds": rounds}))
    }

    /// Waits until that program wants a round.
    pub fn wait(&self) -> Result<()> {
        if self.paced && std::io::stdin().read_line(&mut String::new())? == 0 {
            bail!("--paced: the input ended before the last round");
        }
        Ok(())
    }

    pub fn round(&self, case: &Case, library: &str, value: f64) -> Result<()> {
        self.say(&json!({"event": "round", "case": case, "library": library, "value": value}))
    }

    pub fn end_round(&self) -> Result<()> {
        self.say(&json!({"event": "end of round"}))
    }

    fn say(&self, event: &serde_json::Value) -> Result<()> {
        if self.paced {
            println!("{event}");
        }
        Ok(())
    }

    /// Prints the table.
    pub fn finish(self) -> Result<()> {
        if !self.paced {
            println!("{}", self.table());
        }
        Ok(())
    }

    fn table(&self) -> String {
        let mut table =
            String::from("| model | bits | | | unit | candle-quant | candle | times better | byte floor |\n");
        table += &("|---".repeat(9) + "|\n");
        let mut rows: Vec<(&Case, &str, BTreeMap<&str, &Figure>)> = Vec::new();
        for figure in &self.figures {
            let same = |case: &Case| {
                (case.kind, case.model, case.bits, &case.case)
                    == (figure.case.kind, figure.case.model, figure.case.bits, &figure.case.case)
            };
            match rows.iter_mut().find(|(case, unit, _)| same(case) && *unit == figure.unit) {
                Some((_, _, columns)) => drop(columns.insert(figure.library, figure)),
                None => rows.push((&figure.case, figure.unit, BTreeMap::from([(figure.library, figure)]))),
            }
        }
        for (Case { kind, model, bits, case }, unit, columns) in rows {
            let cell = |library: &str| columns.get(library).map_or(String::new(), |figure| text(figure));
            let median = |library: &str| columns.get(library).map(|figure| figure.median);
            let better = match (median("candle-quant"), median("candle")) {
                (Some(ours), Some(theirs)) if unit.ends_with("/s") => format!("{:.2}", ours / theirs),
                (Some(ours), Some(theirs)) => format!("{:.2}", theirs / ours),
                _ => String::new(),
            };
            let own = if columns.contains_key("machine") { cell("machine") } else { cell("candle-quant") };
            table += &format!(
                "| {model} | {bits} | {kind} | {case} | {unit} | {own} | {} | {better} | {} |\n",
                cell("candle"),
                cell("byte floor"),
            );
        }
        table
    }
}

/// The median, and where there are several rounds the least and the greatest.
fn text(figure: &Figure) -> String {
    let Figure { median, least, most, rounds, .. } = figure;
    let digits = match *median {
        median if median >= 100. => 0,
        median if median >= 10. => 1,
        _ => 3,
    };
    match rounds {
        1 => format!("{median:.digits$}"),
        _ => format!("{median:.digits$} ({least:.digits$} to {most:.digits$})"),
    }
}
