//! Candle's own kernels, compiled from the sources that the build of `candle-kernels` gives to nvcc.

use std::env;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Modules that models use. What is left out (convolutions, products of GGML blocks with 8-bit activations) is unknown to
/// the driver, which names it in its error.
const MODULES: [&str; 10] =
    ["affine", "binary", "cast", "fill", "indexing", "quantized", "reduce", "sort", "ternary", "unary"];

/// As if for sm_80: with bfloat16.
const DEFINES: [(&str, &str); 3] =
    [("__CUDA_ARCH__", "800"), ("__CUDACC_VER_MAJOR__", "13"), ("__CUDACC_VER_MINOR__", "0")];

/// Compiles them with the flags of `build`, one file of C++ for each module. Without sanitizers: it is not them that are
/// tested.
pub fn compile(mut build: cc::Build, here: &Path, out: &Path) {
    let kernels = sources(here);
    println!("cargo:rerun-if-changed={}", kernels.display());
    build.include(here.join("emulator/candle")).include(&kernels);
    // Sources for a compiler that warns of other things.
    build.opt_level(2).warnings(false).flag("-w");
    for (name, value) in DEFINES {
        build.define(name, value);
    }
    for module in MODULES {
        let source = kernels.join(format!("{module}.cu"));
        let mut names = names(&build, &source);
        if module == "quantized" {
            names.retain(|name| name.starts_with("dequantize") || name.starts_with("get_rows"));
        }
        let file = out.join(format!("candle_{module}.cu"));
        write(&file, &in_namespace(module, &read(&source), &names));
        build.file(file);
    }
    build.compile("emulated_candle");
}

/// The source in a namespace of its own, as modules define the same functions; then its kernels, registered.
fn in_namespace(module: &str, source: &str, names: &[String]) -> String {
    let source = with_dynamic_shared(source);
    let mut text = format!("#include \"cuda_fp16.h\"\nnamespace candle_{module} {{\n{source}\n}}\n");
    for name in names {
        writeln!(text, "EMULATED_FUNCTION(candle_{module}, {name})").expect("a String takes any text");
    }
    text
}

/// `extern __shared__ T name[];` declares dynamic shared memory: here a pointer to it.
fn with_dynamic_shared(source: &str) -> String {
    let line = |line: &str| {
        let declared =
            line.trim().strip_prefix("extern __shared__ ").and_then(|rest| rest.strip_suffix("[];"));
        let Some((of, name)) = declared.and_then(|declared| declared.rsplit_once(' ')) else {
            return line.to_owned();
        };
        format!("{of} *{name} = reinterpret_cast<{of} *>(emulator::dynamic_shared());")
    };
    source.lines().map(line).collect::<Vec<_>>().join("\n")
}

/// Names of the kernels, many of which macros make.
fn names(build: &cc::Build, source: &Path) -> Vec<String> {
    // The word itself, so that it is found after macros are expanded.
    let mut command = build.get_compiler().to_command();
    let output = command.args(["-E", "-P", "-D__global__=__global__"]).arg(source).output();
    let output = output.unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout);
    let after = text.split("__global__ void ").skip(1);
    let names: Vec<_> =
        after.filter_map(|rest| rest.split_once('(')).map(|(name, _)| name.trim().into()).collect();
    assert!(!names.is_empty(), "no kernels in {}", source.display());
    names
}

/// Where cargo put the sources of `candle-kernels`.
fn sources(here: &Path) -> PathBuf {
    let cargo = env::var_os("CARGO").expect("cargo sets it");
    let target = env::var("TARGET").expect("cargo sets it");
    let output = Command::new(cargo)
        // Not `--offline`: of a new clone only what was built so far lies on the disk, and this needs all of the workspace.
        .args(["metadata", "--format-version=1", "--locked", "--features=candle-quant/cuda"])
        .args(["--filter-platform", &target, "--manifest-path"])
        .arg(here.join("../../Cargo.toml"))
        .output()
        .expect("cargo runs this program");
    assert!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let packages = metadata["packages"].as_array().into_iter().flatten();
    let mut manifests =
        packages.filter(|package| package["name"] == "candle-kernels").map(|p| &p["manifest_path"]);
    let manifest = manifests.next().and_then(|path| path.as_str()).expect("candle depends on candle-kernels");
    Path::new(manifest).with_file_name("src")
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn write(path: &Path, text: &str) {
    fs::write(path, text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}
