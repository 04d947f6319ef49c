//! Compiles the emulator and every kernel into one static library, and stubs for the rest of CUDA.

mod candle;

use std::env;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

fn main() {
    let here = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    println!("cargo:rerun-if-env-changed=PRETEND_CUDA_KERNELS");
    println!("cargo:rerun-if-env-changed=PRETEND_CUDA_SANITIZE");
    let kernels = env::var_os("PRETEND_CUDA_KERNELS").map_or(here.join("../../cuda"), PathBuf::from);
    let sanitize = env::var("PRETEND_CUDA_SANITIZE").unwrap_or_default();
    compile(&here, &kernels, &out, &sanitize);
    link(&out, &sanitize);
    write_stubs(&here.join("symbols"), &out.join("stubs.rs"));
}

/// Kernels lie between the two files that mark where their static shared memory would begin and end.
fn compile(here: &Path, kernels: &Path, out: &Path, sanitize: &str) {
    let emulator = here.join("emulator");
    let (begin, end) = (emulator.join("shared_begin.cpp"), emulator.join("shared_end.cpp"));
    let mut build = cc::Build::new();
    build
        .cpp(true)
        .cargo_metadata(false)
        .std("c++17")
        // Kernels with checks take several times as long to compile, and longer the more they are optimised.
        .opt_level(if sanitize.is_empty() { 2 } else { 1 })
        .define("CANDLE_QUANT_EMULATED", None)
        .include(&emulator)
        .flag("-Wno-unknown-pragmas")
        // As on a GPU: operations are not joined unless the source says so, pointers may be of any type.
        .flag("-ffp-contract=off")
        .flag("-fno-strict-aliasing")
        .flag("-fvisibility=hidden");
    if env::var("CARGO_CFG_TARGET_ARCH").as_deref() == Ok("x86_64") {
        build.flag("-march=x86-64-v3");
    }
    // Sources are C++ whatever they are called.
    build.flag("-x").flag("c++");
    candle::compile(build.clone(), here, out);
    if !sanitize.is_empty() {
        build.flag(format!("-fsanitize={sanitize}")).flag("-fno-sanitize-recover=all").flag("-g1");
        // An access through such a pointer is one that AddressSanitizer, or the machine, notices.
        build.flag("-fno-sanitize=null,object-size,pointer-overflow");
    }
    build.file(&begin);
    build.files(sources(kernels, "cu")).files(sources(&here.join("tests/kernels"), "cu"));
    build.file(&end);
    build.files(sources(&emulator, "cpp").into_iter().filter(|file| *file != begin && *file != end));
    build.compile("emulated_kernels");
    for folder in [&emulator, kernels, &here.join("tests/kernels")] {
        println!("cargo:rerun-if-changed={}", folder.display());
    }
}

/// Files of `folder` with `extension`, in order of name; none if there is no such folder.
fn sources(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut files: Vec<_> = entries
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|e| e == extension))
        .collect();
    files.sort();
    files
}

fn link(out: &Path, sanitize: &str) {
    println!("cargo:rustc-link-search=native={}", out.display());
    // Kernels register themselves; nothing else refers to them.
    println!("cargo:rustc-link-lib=static:+whole-archive,-bundle=emulated_kernels");
    // After the end of what is poisoned before every block, or that would take long: theirs is static.
    println!("cargo:rustc-link-lib=static:+whole-archive,-bundle=emulated_candle");
    println!("cargo:rustc-link-lib=stdc++");
    for (sanitizer, library) in [("address", "asan"), ("undefined", "ubsan")] {
        if sanitize.split(',').any(|one| one == sanitizer) {
            println!("cargo:rustc-link-lib={library}");
        }
    }
    if sanitize.contains("address") {
        println!("cargo:rustc-cfg=address_sanitizer");
    }
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
}

/// `symbols/<library>` names the functions that exist only so that programs link and start.
fn write_stubs(symbols: &Path, path: &Path) {
    let mut stubs = String::new();
    for (library, answer) in [
        ("cuda", "unsupported!(801)"),
        ("cublas", "unsupported!(15)"),
        ("cublasLt", "unsupported!(15)"),
        ("curand", "unsupported!(999)"),
        ("nvrtc", "unsupported!(11)"),
        ("nccl", "unsupported!(5)"),
    ] {
        let file = symbols.join(library);
        println!("cargo:rerun-if-changed={}", file.display());
        let names = fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        for name in names.lines() {
            writeln!(stubs, "stub!({name}, {answer});").expect("a String takes any text");
        }
    }
    fs::write(path, stubs).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}
