//! Programs with candle's feature `cuda` that start on machines without CUDA.
//!
//! candle links the libraries of CUDA dynamically: a program that is built with its feature `cuda` ends in the loader, before
//! `main`, where there is no driver. With this crate they are loaded at the first call of one of their functions. Where there
//! are none, `Device::new_cuda` is an error like any other, and the program can go on with `Device::Cpu`.
//!
//! It is for the `build.rs` of a program; in that of a library it may come too late for those that use it:
//!
//! ```toml
//! [build-dependencies]
//! candle-quant-delay-load = "0.1"
//! ```
//! ```no_run
//! // `main` of build.rs:
//! candle_quant_delay_load::link();
//! ```
//!
//! # How
//! The linker is to find `libcuda` and the others in the folder that it searches first, that of the program's own build script,
//! and there they are static archives. Each of their functions is a jump through a table. An empty entry is looked up by
//! `dlopen` and `dlsym`; what is not found returns the library's code for that there is no device, or no such library.
//!
//! On Linux on x86-64. Elsewhere nothing changes, and a warning says so.

use std::env;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A library of CUDA.
struct Library {
    /// As the linker knows it.
    name: &'static str,
    version: Version,
    /// What its functions return if it is not there.
    missing: u32,
    /// All of its functions that cudarc declares.
    functions: &'static str,
}

/// What stands behind `.so` in the name of a library.
enum Version {
    /// That of the toolkit.
    Toolkit,
    Fixed(u32),
}

/// The codes: `CUDA_ERROR_STUB_LIBRARY`, `cudaErrorInsufficientDriver`, `CUBLAS_STATUS_NOT_INITIALIZED` (twice),
/// `CURAND_STATUS_INITIALIZATION_FAILED`, `NVRTC_ERROR_INTERNAL_ERROR`, `ncclSystemError`.
const LIBRARIES: [Library; 7] = [
    library("cuda", Version::Fixed(1), 34, include_str!("../symbols/cuda")),
    library("cudart", Version::Toolkit, 35, include_str!("../symbols/cudart")),
    library("cublas", Version::Toolkit, 1, include_str!("../symbols/cublas")),
    library("cublasLt", Version::Toolkit, 1, include_str!("../symbols/cublasLt")),
    library("curand", Version::Fixed(10), 203, include_str!("../symbols/curand")),
    library("nvrtc", Version::Toolkit, 11, include_str!("../symbols/nvrtc")),
    library("nccl", Version::Fixed(2), 2, include_str!("../symbols/nccl")),
];

const fn library(name: &'static str, version: Version, missing: u32, functions: &'static str) -> Library {
    Library { name, version, missing, functions }
}

/// Functions that do not return a code, but the text that explains one.
const RETURN_TEXT: [&str; 9] = [
    "cublasGetStatusName",
    "cublasGetStatusString",
    "cublasLtGetStatusName",
    "cublasLtGetStatusString",
    "cudaGetErrorName",
    "cudaGetErrorString",
    "ncclGetErrorString",
    "ncclGetLastError",
    "nvrtcGetErrorString",
];

/// Functions that write where the text is that explains a code.
const WRITE_TEXT: [&str; 2] = ["cuGetErrorName", "cuGetErrorString"];

/// Has CUDA's libraries loaded by the program of this build script when they are first called.
///
/// The toolkit's version is that of `CUDARC_CUDA_VERSION`, or of the `nvcc` in `PATH`, as for candle. What is wrong becomes
/// an error of the build.
pub fn link() {
    println!("cargo::rerun-if-env-changed=CUDARC_CUDA_VERSION");
    println!("cargo::rerun-if-env-changed=PATH");
    let variable = |name: &str| env::var(name).unwrap_or_default();
    let target = ["ARCH", "OS", "ENV"].map(|part| variable(&format!("CARGO_CFG_TARGET_{part}")));
    if target != ["x86_64", "linux", "gnu"] {
        let target = variable("TARGET");
        println!("cargo::warning=CUDA's libraries are needed to start a program for {target}");
        return;
    }
    let folder = PathBuf::from(variable("OUT_DIR")).join("delay-load");
    let written = toolkit_version().and_then(|version| {
        write_archives(&folder, version).map_err(|error| format!("{}: {error}", folder.display()))
    });
    match written {
        Ok(()) => println!("cargo::rustc-link-search=native={}", folder.display()),
        Err(error) => println!("cargo::error={error}"),
    }
}

/// The first number of the toolkit's version.
fn toolkit_version() -> Result<u32, String> {
    if let Ok(version) = env::var("CUDARC_CUDA_VERSION") {
        // 13000 is 13.0.
        let number =
            version.parse::<u32>().map_err(|_| format!("CUDARC_CUDA_VERSION: {version}: no number"))?;
        return Ok(number / 1000);
    }
    let wrong =
        |problem: &str| format!("nvcc --version: {problem}; candle's feature `cuda` needs the CUDA toolkit");
    let output = Command::new("nvcc").arg("--version").output().map_err(|error| wrong(&error.to_string()))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let version = text.split_once("release ").and_then(|(_, rest)| rest.split('.').next()?.parse().ok());
    version.ok_or_else(|| wrong("tells no release"))
}

/// Writes an archive for each library into a folder, for this version of the toolkit.
fn write_archives(folder: &Path, toolkit: u32) -> io::Result<()> {
    for library in &LIBRARIES {
        let own = folder.join(library.name);
        fs::create_dir_all(&own)?;
        fs::write(own.join("library.h"), library.header(toolkit))?;
        fs::write(own.join("trampolines.S"), library.trampolines())?;
        fs::write(own.join("delay_load.c"), include_str!("delay_load.c"))?;
        cc::Build::new()
            .cargo_metadata(false)
            .warnings_into_errors(true)
            .out_dir(folder)
            .include(&own)
            .file(own.join("delay_load.c"))
            .file(own.join("trampolines.S"))
            .try_compile(library.name)
            .map_err(io::Error::other)?;
    }
    Ok(())
}

impl Library {
    fn functions(&self) -> impl Iterator<Item = &'static str> {
        self.functions.split_whitespace()
    }

    /// What `delay_load.c` is compiled with.
    fn header(&self, toolkit: u32) -> String {
        let Self { name, missing, .. } = self;
        let version = match self.version {
            Version::Toolkit => toolkit,
            Version::Fixed(version) => version,
        };
        let mut text = format!(
            "#define TABLE delay_load_{name}_table\n#define RESOLVE delay_load_{name}_resolve\n\
             #define FILE_NAME \"lib{name}.so.{version}\"\n#define OTHER_FILE_NAME \"lib{name}.so\"\n\
             #define MISSING {missing}\n#define FUNCTIONS"
        );
        for function in self.functions() {
            let kind = if RETURN_TEXT.contains(&function) {
                "RETURNS_TEXT"
            } else if WRITE_TEXT.contains(&function) {
                "WRITES_TEXT"
            } else {
                "RETURNS_CODE"
            };
            text += &format!(" \\\n  {{\"{function}\", {kind}}},");
        }
        text.push('\n');
        text
    }

    /// Each function jumps to where its entry in the table leads. An empty entry is filled first, with all registers kept
    /// that may hold arguments.
    fn trampolines(&self) -> String {
        let name = self.name;
        let mut text = ".section .note.GNU-stack,\"\",@progbits\n.text\n".to_owned();
        for (number, function) in self.functions().enumerate() {
            text += &format!(
                ".globl {function}\n.type {function}, @function\n{function}:\n\
                 movq delay_load_{name}_table+{offset}(%rip), %rax\ntestq %rax, %rax\njz 1f\njmp *%rax\n\
                 1: movl ${number}, %eax\njmp delay_load_{name}_first_call\n",
                offset = 8 * number,
            );
        }
        const ARGUMENTS: [&str; 6] = ["rdi", "rsi", "rdx", "rcx", "r8", "r9"];
        let all =
            |instruction: &dyn Fn(usize) -> String, count| (0..count).map(instruction).collect::<String>();
        text += &format!("delay_load_{name}_first_call:\n");
        text += &all(&|number| format!("pushq %{}\n", ARGUMENTS[number]), 6);
        text += "subq $136, %rsp\n";
        text += &all(&|number| format!("movdqu %xmm{number}, {}(%rsp)\n", 16 * number), 8);
        text += &format!("movl %eax, %edi\ncall delay_load_{name}_resolve\n");
        text += &all(&|number| format!("movdqu {}(%rsp), %xmm{number}\n", 16 * number), 8);
        text += "addq $136, %rsp\n";
        text += &all(&|number| format!("popq %{}\n", ARGUMENTS[5 - number]), 6);
        text += "jmp *%rax\n";
        text
    }
}

#[cfg(test)]
mod tests;
