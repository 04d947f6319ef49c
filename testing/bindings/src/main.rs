//! Generates `src/backend/cuda/bindings.rs` from `cuda/params.h`.
//!
//! `cargo run -p bindings` writes it, `cargo run -p bindings -- --check` fails if the committed file
//! differs. Neither if a struct has padding: its bytes are undefined, and the driver would be given them. Needs libclang (`pip install libclang`, with `LIBCLANG_PATH` at its folder `native`).

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let committed = root.join("src/backend/cuda/bindings.rs");
    let generated = match generate(&root) {
        Ok(generated) => generated,
        Err(error) => return failure(&format!("cuda/params.h: {error}")),
    };
    if let Some(padded) = padded(&generated) {
        return failure(&format!(
            "cuda/params.h: {padded} has padding; name its bytes, so that they are set"
        ));
    }
    if std::env::args().skip(1).any(|argument| argument == "--check") {
        let current = std::fs::read_to_string(&committed).unwrap_or_default();
        return match current == generated {
            true => ExitCode::SUCCESS,
            false => {
                failure("src/backend/cuda/bindings.rs is not that of cuda/params.h; cargo run -p bindings")
            }
        };
    }
    match std::fs::write(&committed, generated) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failure(&format!("{}: {error}", committed.display())),
    }
}

/// The first struct that has bytes of no field.
fn padded(generated: &str) -> Option<&str> {
    let (before, _) = generated.split_once("__bindgen_padding")?;
    before.rsplit_once("struct ")?.1.split_whitespace().next()
}

fn failure(message: &str) -> ExitCode {
    eprintln!("{message}");
    ExitCode::FAILURE
}

fn generate(root: &Path) -> Result<String, bindgen::BindgenError> {
    let bindings = bindgen::Builder::default()
        .header(root.join("cuda/params.h").to_string_lossy())
        .allowlist_type("Cq.*")
        .allowlist_var("CQ_.*")
        .default_enum_style(bindgen::EnumVariation::Consts)
        .prepend_enum_name(false)
        .generate_comments(false)
        .use_core()
        .layout_tests(true)
        .explicit_padding(true)
        .disable_header_comment()
        .raw_line("// Generated from cuda/params.h by `cargo run -p bindings`; do not edit.")
        .formatter(bindgen::Formatter::Rustfmt)
        .rustfmt_configuration_file(Some(root.join("rustfmt.toml").canonicalize().unwrap_or_default()))
        .generate()?;
    Ok(bindings.to_string())
}
