//! The rooms of each crate, and who may use whom: arrows point down the table, never up, and in no circle.
//!
//! Read from the sources: `use` lines, and paths that begin with `crate`, `super` or `self`; tests count as well. What
//! no path shows is not seen, such as a method that another room adds to a type.

mod arrows;
mod scan;

use arrows::{Floor, Room, Sources};
use std::path::Path;

const fn room(name: &'static str, may_use: &'static [&'static str]) -> Room {
    Room { name, may_use }
}

/// From the bottom to the top. Whoever adds a room says here what it may use.
const CRATE: Floor = Floor {
    module: "",
    complete: true,
    rooms: &[
        room("error", &[]),
        room("known", &[]),
        room("format", &["error"]),
        room("memory_nodes", &[]),
        room("tensor", &["error", "format", "memory_nodes"]),
        room("distributed", &["error", "known", "format"]),
        room("backend", &["error", "known", "format", "memory_nodes", "tensor", "distributed"]),
        // It chooses no kernels.
        room("checkpoint", &["error", "format", "memory_nodes", "tensor"]),
        room("nn", &["error", "format", "tensor", "distributed", "backend", "checkpoint"]),
    ],
};

/// The rooms of `crates/models`: a model knows its sharding, which knows no model; it is trained and text is generated
/// above both, and a conversation is made of such texts.
const MODELS: Floor = Floor {
    module: "",
    complete: false,
    rooms: &[
        room("sharding", &[]),
        room("attention", &["sharding"]),
        room("decoder", &["sharding", "attention"]),
        room("train", &["decoder"]),
        room("generate", &["decoder"]),
        room("chat", &["generate"]),
    ],
};

/// The rooms of the CPU's kernels: instructions, codes, algorithms, and the table that chooses among them.
const CPU: Floor = Floor {
    module: "backend::cpu",
    complete: false,
    rooms: &[
        room("isa", &[]),
        room("codec", &["isa"]),
        room("row_gemv", &["isa"]),
        room("f32", &["isa", "codec", "row_gemv"]),
        room("int8", &["isa", "row_gemv"]),
        room("bf16", &["isa"]),
        room("attention", &["isa"]),
        room("dispatch", &["isa", "f32", "int8", "bf16"]),
        room("team", &[]),
        room("step", &["isa", "attention", "dispatch", "team"]),
    ],
};

/// The rooms of `crates/tools`, from the bottom to the top.
const TOOLS: Floor = Floor {
    module: "",
    complete: true,
    rooms: &[
        room("sha256", &[]),
        room("chunks", &[]),
        room("source", &["sha256"]),
        room("staging", &["sha256"]),
        room("importance", &["sha256", "source", "staging"]),
        room("patch_candle", &["sha256", "staging"]),
        room("bench", &[]),
        room("verify", &["sha256", "chunks", "source"]),
        room("convert", &["sha256", "chunks", "source", "staging", "importance"]),
        // Other orders of the same numbers are what a conversion makes of them.
        room("diff", &["chunks", "source", "convert"]),
        room("quantized", &["staging", "convert"]),
        room("fit", &["convert"]),
        // The recipe of a conversion is told by its manifest.
        room("provenance", &["staging"]),
    ],
};

/// The folders of `checkpoint`: no kind of checkpoint knows another one, unless its files lie inside of that.
const CHECKPOINT: Floor = Floor {
    module: "checkpoint",
    complete: false,
    rooms: &[
        room("family_layouts", &[]),
        room("file", &[]),
        room("weight", &["file"]),
        // It knows no layer.
        room("adapter", &["file", "weight"]),
        // Names and files of repositories, whatever is in them.
        room("hub", &["file"]),
        room("gguf", &["family_layouts", "file", "weight"]),
        room("hf", &["file", "weight"]),
        room("mlx", &["file", "weight"]),
        room("slm1", &["file", "weight"]),
        // Its blobs are GGUF files.
        room("ollama", &["file", "weight", "gguf"]),
        room("uqff", &["family_layouts", "file", "weight"]),
        // Names only, whatever kind of checkpoint.
        room("views", &["family_layouts", "weight"]),
    ],
};

/// The folders of `convert`, as its documentation draws them.
const CONVERT: Floor = Floor {
    module: "convert",
    complete: false,
    rooms: &[
        room("recipe", &[]),
        room("output", &["recipe"]),
        room("gguf", &[]),
        room("target", &["recipe", "output", "gguf"]),
        room("plan", &["recipe", "output", "gguf", "target"]),
        room("run", &["recipe", "output", "target", "plan"]),
        room("bit_budget", &["recipe", "output", "target", "plan", "run"]),
        room("scales", &["output", "plan", "run"]),
    ],
};

/// A crate below the repository, and the floors that its arrows are held against. Cargo sees to arrows between crates.
fn check(path: &str, floors: &[Floor]) {
    let sources = Sources::read(&Path::new(env!("CANDLE_QUANT_REPOSITORY")).join(path));
    let mut problems: Vec<_> = floors.iter().flat_map(|floor| sources.forbidden(floor)).collect();
    let within = sources.floors().into_iter().chain([String::new()]);
    problems.extend(within.flat_map(|module| sources.circles(&module)));
    assert!(problems.is_empty(), "{path}:\n{}\n", problems.join("\n"));
}

#[test]
fn arrows_between_rooms_point_down() {
    check("", &[CRATE, CHECKPOINT, CPU]);
    check("crates/models", &[MODELS]);
    check("crates/tools", &[TOOLS, CONVERT]);
}

/// Rooms for planted arrows.
const HOUSE: Floor = Floor {
    module: "",
    complete: true,
    rooms: &[room("tensor", &[]), room("nn", &["tensor"]), room("models", &["nn"])],
};

const LIB: &str = "mod tensor;\nmod nn;\nmod models;\npub use models::Model;\npub use nn::Linear;";
const NN: &str = "mod linear;\npub use linear::Linear;\npub use crate::tensor::Weight;";

fn problems(linear: &str, rest: &[(&str, &str)]) -> Vec<String> {
    let own = [("src/lib.rs", LIB), ("src/nn/mod.rs", NN), ("src/nn/linear.rs", linear)];
    let others = [("src/tensor.rs", ""), ("src/models.rs", "use crate::nn::Weight;")];
    let given = |path: &str| rest.iter().any(|(other, _)| *other == path);
    let others = others.into_iter().filter(|(path, _)| !given(path));
    Sources::new(own.into_iter().chain(others).chain(rest.iter().copied())).forbidden(&HOUSE)
}

#[test]
fn an_arrow_that_runs_up_is_found() {
    let up = |line| vec![format!("src/nn/linear.rs:{line}: `nn` uses `models`; it may use tensor")];
    for (line, source) in [
        (1, "use crate::models;"),
        (1, "use crate::models::*;"),
        (2, "\nuse super::super::models::Config as Other;"),
        (3, "use crate::{\n    tensor::Weight,\n    models::{config::Config, Model}};"),
        (2, "fn f() {\n    let x = crate::models::new();\n}"),
        (1, "pub(crate) use crate::Model;"),
        (3, "#[cfg(test)]\nmod tests {\n    use super::super::super::models::Config;\n}"),
    ] {
        assert_eq!(problems(source, &[]), up(line), "{source}");
    }
    for source in [
        "use crate::tensor::Weight;",
        "use super::Weight;",
        "use crate::Linear;",
        "//! [`Model`](crate::models::Model)\n// use crate::models;\nconst A: &str = \"use crate::models;\";",
        "use other_crate::models::Config;",
    ] {
        assert_eq!(problems(source, &[]), [""; 0], "{source}");
    }
}

#[test]
fn a_room_answers_for_the_names_that_it_passes_on() {
    // The root is no room: what it passes on is followed. `nn` is one, though the weight is the tensor's.
    let told = problems("", &[("src/tensor.rs", "use crate::Linear;\nuse crate::nn::Weight;")]);
    assert_eq!(
        told,
        [1, 2].map(|line| format!("src/tensor.rs:{line}: `tensor` uses `nn`; it may use no other room"))
    );
    let told =
        problems("", &[("src/models.rs", "use crate::nn::Weight;\nuse super::tensor::Weight as Same;")]);
    assert_eq!(told, ["src/models.rs:2: `models` uses `tensor`; it may use nn"]);
}

#[test]
fn the_table_knows_all_rooms() {
    let told = problems("", &[("src/attic/mod.rs", "")]);
    assert_eq!(told, ["`attic` is not in the table of rooms"]);
    const ROOMS: [Room; 3] = [room("tensor", &["nn"]), room("nn", &[]), room("cellar", &[])];
    let rooms = Floor { rooms: &ROOMS, ..HOUSE };
    let sources = Sources::new([("src/tensor.rs", ""), ("src/nn/mod.rs", "")]);
    let told = sources.forbidden(&rooms);
    let upward = "the table lets `tensor` use `nn`, which does not come before it";
    assert_eq!(told, [upward, "there is no room `cellar` any more"]);
}

#[test]
fn circles_between_folders_are_found() {
    let sources = Sources::new([
        ("src/checkpoint/mod.rs", "mod mlx;\nmod hf;\npub use mlx::Config;\nmod names;"),
        ("src/checkpoint/names.rs", "use super::mlx::Config;"),
        ("src/checkpoint/hf/mod.rs", "use super::names;\nuse super::Config;"),
        ("src/checkpoint/mlx/mod.rs", "mod config;\npub use config::Config;"),
        ("src/checkpoint/mlx/config.rs", "use crate::checkpoint::gguf::Name;"),
        ("src/checkpoint/gguf/mod.rs", "\nuse super::hf;"),
    ]);
    let circle = "a circle: `gguf` uses `hf` (src/checkpoint/gguf/mod.rs:2), \
                  `hf` uses `mlx` (src/checkpoint/hf/mod.rs:2), \
                  `mlx` uses `gguf` (src/checkpoint/mlx/config.rs:1)";
    assert_eq!(sources.circles("checkpoint"), [circle]);
    assert_eq!(sources.circles(""), [""; 0]);
    let told = sources.forbidden(&CHECKPOINT);
    assert_eq!(told.len(), 3, "{told:?}");
    assert_eq!(told[1], "src/checkpoint/hf/mod.rs:2: `hf` uses `mlx`; it may use file, weight");
}

/// Names of any file reach a terminal through one place, which escapes them.
#[test]
fn the_program_speaks_through_one_file() {
    let folder = Path::new(env!("CANDLE_QUANT_REPOSITORY")).join("crates/tools/src/bin/candle-quant");
    let mut folders = vec![folder];
    let mut files = 0;
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            files += 1;
            let text = std::fs::read_to_string(&path).unwrap();
            let speaks = ["print!(", "println!(", "dbg!(", "io::stdout", "io::stderr", "Stdout", "Stderr"];
            let found = speaks.into_iter().find(|way| text.contains(way));
            assert!(path.ends_with("terminal.rs") || found.is_none(), "{}: {found:?}", path.display());
        }
    }
    assert!(files > 10, "{files}");
}
