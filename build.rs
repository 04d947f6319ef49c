//! Compiles the CUDA kernels, one fatbin for each `cuda/*.cu`. Without the feature `cuda` it does nothing.

use std::env;
use std::fmt::Write as _;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Mutex;

/// The architectures that machine code is made for unless an environment variable says otherwise.
const DEFAULT_ARCHS: [&str; 7] = ["75", "80", "86", "89", "90", "100", "120"];

/// What this script looks at. A change of one of them runs it again.
const VARIABLES: [&str; 7] =
    ["CANDLE_QUANT_CUDA_ARCHS", "CUDA_COMPUTE_CAP", "NVCC", "NVCC_CCBIN", "CUDA_HOME", "CUDA_PATH", "PATH"];

type Result<T> = std::result::Result<T, String>;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    println!("cargo::rerun-if-changed=cuda");
    for variable in VARIABLES {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    if let Err(error) = build_kernels() {
        for line in error.lines() {
            println!("cargo::error={line}");
        }
    }
}

fn build_kernels() -> Result<()> {
    let out_dir = PathBuf::from(variable("OUT_DIR").ok_or("cargo sets OUT_DIR")?);
    let (sources, headers) = sources(Path::new("cuda"))?;
    let nvcc = Nvcc::find()?;
    let mut flags = nvcc.flags();
    let archs = nvcc.architectures()?;
    println!("cargo::rustc-env=CANDLE_QUANT_BUILT_ARCHS={}", archs.join(";"));
    flags.extend(architecture_flags(&archs));
    let common = fingerprint(&headers)? ^ hash(&(&nvcc.path, nvcc.version()?, &flags));

    let jobs: Vec<Job> =
        sources.iter().map(|source| Job::new(source, &out_dir, common)).collect::<Result<_>>()?;
    let stale: Vec<&Job> = jobs.iter().filter(|job| !job.is_current()).collect();
    in_parallel(&stale, |job| job.compile(&nvcc, &flags))?;
    write_index(&out_dir, &jobs)
}

/// The `.cu` files of a folder, and all headers in and below it.
fn sources(folder: &Path) -> Result<(Vec<PathBuf>, Vec<PathBuf>)> {
    let (mut sources, mut headers) = (Vec::new(), Vec::new());
    let mut folders = vec![folder.to_path_buf()];
    while let Some(next) = folders.pop() {
        let entries = fs::read_dir(&next).map_err(|error| format!("{}: {error}", next.display()))?;
        for entry in entries {
            let path = entry.map_err(|error| format!("{}: {error}", next.display()))?.path();
            match path.extension().and_then(|extension| extension.to_str()) {
                Some("cu") if next == folder => sources.push(path),
                Some("cuh" | "h") => headers.push(path),
                _ if path.is_dir() => folders.push(path),
                _ => {}
            }
        }
    }
    sources.sort();
    headers.sort();
    Ok((sources, headers))
}

/// One source and what it is compiled to.
struct Job {
    source: PathBuf,
    /// The file name without its extension; every kernel in it is called so, or `<name>_..`.
    name: String,
    fatbin: PathBuf,
    /// Holds `fingerprint` once the fatbin is complete.
    stamp: PathBuf,
    fingerprint: String,
}

impl Job {
    fn new(source: &Path, out_dir: &Path, common: u64) -> Result<Self> {
        let name = source.file_stem().and_then(|stem| stem.to_str());
        let name = name.ok_or_else(|| format!("{}: not a UTF-8 file name", source.display()))?;
        let own = fingerprint(&[source.to_path_buf()])?;
        Ok(Self {
            source: source.to_path_buf(),
            name: name.to_string(),
            fatbin: out_dir.join(format!("{name}.fatbin")),
            stamp: out_dir.join(format!("{name}.stamp")),
            fingerprint: format!("{:016x}", own ^ common),
        })
    }

    fn is_current(&self) -> bool {
        self.fatbin.exists() && fs::read_to_string(&self.stamp).is_ok_and(|stamp| stamp == self.fingerprint)
    }

    fn compile(&self, nvcc: &Nvcc, flags: &[String]) -> Result<()> {
        // A compiler that is interrupted may leave half a file.
        let _ = fs::remove_file(&self.stamp);
        let mut command = Command::new(&nvcc.path);
        command.args(flags).arg("-o").arg(&self.fatbin).arg(&self.source);
        let output = command.output().map_err(|error| format!("{}: {error}", nvcc.path.display()))?;
        if !output.status.success() {
            let told = [output.stdout, output.stderr].concat();
            return Err(format!(
                "{} does not compile ({})\n{}",
                self.source.display(),
                output.status,
                String::from_utf8_lossy(&told)
            ));
        }
        fs::write(&self.stamp, &self.fingerprint)
            .map_err(|error| format!("{}: {error}", self.stamp.display()))
    }
}

/// Writes `fatbins.rs`: the name and the bytes of every fatbin.
fn write_index(out_dir: &Path, jobs: &[Job]) -> Result<()> {
    let mut index = String::from("pub(super) const FATBINS: &[(&str, &[u8])] = &[\n");
    for Job { name, .. } in jobs {
        let _ = writeln!(
            index,
            "    ({name:?}, include_bytes!(concat!(env!(\"OUT_DIR\"), \"/{name}.fatbin\"))),"
        );
    }
    index.push_str("];\n");
    let path = out_dir.join("fatbins.rs");
    fs::write(&path, index).map_err(|error| format!("{}: {error}", path.display()))
}

struct Nvcc {
    path: PathBuf,
}

impl Nvcc {
    /// The compiler that the environment names, or the first that is found.
    fn find() -> Result<Self> {
        if let Some(path) = variable("NVCC") {
            return Ok(Self { path: path.into() });
        }
        let in_toolkit = |root: &Path| root.join("bin").join(format!("nvcc{}", env::consts::EXE_SUFFIX));
        let of_variable = |name| variable(name).map(|root| in_toolkit(Path::new(&root)));
        let on_path = variable("PATH").map(|path| {
            let name = format!("nvcc{}", env::consts::EXE_SUFFIX);
            env::split_paths(&path).map(move |folder| folder.join(&name)).collect::<Vec<_>>()
        });
        [of_variable("CUDA_HOME"), of_variable("CUDA_PATH")]
            .into_iter()
            .flatten()
            .chain(on_path.into_iter().flatten())
            .chain([in_toolkit(Path::new("/usr/local/cuda"))])
            .chain(python_toolkits().iter().map(|root| in_toolkit(root)))
            .find(|path| path.is_file())
            .map(|path| Self { path })
            .ok_or_else(|| {
                "the feature `cuda` needs nvcc, which is neither named by NVCC, CUDA_HOME or CUDA_PATH, nor on \
                 PATH, nor among Python's packages. Install the CUDA toolkit (or: pip install \
                 nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm nvidia-cuda-runtime nvidia-cuda-cccl) and set \
                 CUDA_HOME, or build without the feature `cuda`."
                    .to_string()
            })
    }

    fn run(&self, argument: &str) -> Result<String> {
        let told = |why: &dyn std::fmt::Display| {
            format!("{} {argument}: {why}; point NVCC or CUDA_HOME at a working nvcc", self.path.display())
        };
        let output = Command::new(&self.path).arg(argument).output().map_err(|error| told(&error))?;
        match output.status.success() {
            true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
            false => Err(told(&output.status)),
        }
    }

    fn version(&self) -> Result<String> {
        self.run("--version")
    }

    /// Those that are asked for, or all of the default ones that this compiler knows.
    fn architectures(&self) -> Result<Vec<String>> {
        let asked = variable("CANDLE_QUANT_CUDA_ARCHS").or_else(|| variable("CUDA_COMPUTE_CAP"));
        if let Some(asked) = asked {
            return parse_architectures(&asked);
        }
        let known = self.run("--list-gpu-code")?;
        let known: Vec<&str> = known.split_whitespace().collect();
        let archs: Vec<String> = DEFAULT_ARCHS
            .iter()
            .filter(|arch| known.contains(&format!("sm_{arch}").as_str()))
            .map(|arch| arch.to_string())
            .collect();
        match archs.is_empty() {
            false => Ok(archs),
            true => Err(format!("{} knows none of sm_{DEFAULT_ARCHS:?}; it is too old", self.path.display())),
        }
    }

    fn flags(&self) -> Vec<String> {
        // Warnings are errors in scripts/sass-gate.sh; here the compiler may be another, which has warnings of its own.
        let mut flags: Vec<String> = ["--fatbin", "-std=c++17", "-O3"].map(String::from).to_vec();
        if let Some(host_compiler) = variable("NVCC_CCBIN") {
            flags.extend(["-ccbin".to_string(), host_compiler]);
        }
        flags
    }
}

/// Toolkits that pip has installed: `nvidia/cu13` and the like in a folder of Python's packages.
fn python_toolkits() -> Vec<PathBuf> {
    let script = "import sysconfig; print(sysconfig.get_paths()['purelib'])";
    let output = ["python3", "python"].iter().find_map(|python| {
        Command::new(python).args(["-c", script]).output().ok().filter(|output| output.status.success())
    });
    let Some(output) = output else { return Vec::new() };
    let folder = Path::new(String::from_utf8_lossy(&output.stdout).trim()).join("nvidia");
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut roots: Vec<PathBuf> = entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("cu1"))
        .map(|entry| entry.path())
        .collect();
    roots.sort();
    roots.reverse();
    roots
}

/// `75;8.0 90a` becomes 75, 80, 90a.
fn parse_architectures(list: &str) -> Result<Vec<String>> {
    let archs: Vec<String> = list
        .split([';', ',', ' '])
        .filter(|arch| !arch.is_empty())
        .map(|arch| arch.replace('.', ""))
        .collect();
    let is_arch = |arch: &String| {
        let number = arch.strip_suffix(['a', 'f']).unwrap_or(arch);
        number.len() >= 2 && number.bytes().all(|byte| byte.is_ascii_digit())
    };
    match !archs.is_empty() && archs.iter().all(is_arch) {
        true => Ok(archs),
        false => Err(format!("CUDA architectures: expected a list such as 80;90, found {list:?}")),
    }
}

/// Machine code for each, and PTX, which the driver compiles for a card that no machine code is for: of the first
/// architecture that has all the features that kernels use, so that every later card is served (PTX of 120 leaves out
/// 110), else of the last. Architecture-specific features (90a) have no place in PTX, which later cards run.
fn architecture_flags(archs: &[String]) -> Vec<String> {
    const NEWEST_FEATURES: u32 = 90;
    let machine_code = archs.iter().map(|arch| format!("arch=compute_{arch},code=sm_{arch}"));
    let mut numbers: Vec<u32> =
        archs.iter().filter_map(|arch| arch.trim_end_matches(['a', 'f']).parse().ok()).collect();
    numbers.sort_unstable();
    let enough = numbers.iter().find(|arch| **arch >= NEWEST_FEATURES);
    let ptx = enough.or(numbers.last()).map(|arch| format!("arch=compute_{arch},code=compute_{arch}"));
    machine_code.chain(ptx).flat_map(|code| ["-gencode".to_string(), code]).collect()
}

/// Works on `NUM_JOBS` items at a time; the first error of each thread is told.
fn in_parallel<T: Sync>(items: &[T], work: impl Fn(&T) -> Result<()> + Sync) -> Result<()> {
    let jobs = variable("NUM_JOBS").and_then(|jobs| jobs.parse().ok()).unwrap_or(1);
    let next = AtomicUsize::new(0);
    let errors = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..items.len().min(jobs) {
            scope.spawn(|| {
                while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(error) = work(item) {
                        errors.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push(error);
                        return;
                    }
                }
            });
        }
    });
    let errors = errors.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    match errors.is_empty() {
        true => Ok(()),
        false => Err(errors.join("\n")),
    }
}

fn fingerprint(files: &[PathBuf]) -> Result<u64> {
    let contents: io::Result<Vec<Vec<u8>>> = files.iter().map(fs::read).collect();
    Ok(hash(&(files, contents.map_err(|error| format!("{files:?}: {error}"))?)))
}

fn hash(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

fn variable(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether a card of this compute capability finds an image: machine code of its major version that is not newer, or
    /// PTX that is not newer.
    fn serves(flags: &[String], card: u32) -> bool {
        let codes = flags.iter().filter_map(|flag| flag.split_once("code=")).map(|(_, code)| code);
        let number = |code: &str, prefix| code.strip_prefix(prefix)?.parse::<u32>().ok();
        codes.into_iter().any(|code| {
            let machine_code = number(code, "sm_").is_some_and(|arch| arch / 10 == card / 10 && arch <= card);
            machine_code || number(code, "compute_").is_some_and(|arch| arch <= card)
        })
    }

    #[test]
    fn every_card_has_an_image() {
        let flags = architecture_flags(&DEFAULT_ARCHS.map(String::from));
        for card in [75, 80, 86, 87, 89, 90, 100, 103, 110, 120, 121, 130] {
            assert!(serves(&flags, card), "sm_{card}: {flags:?}");
        }
        assert!(!serves(&flags, 72));
    }

    #[test]
    fn one_architecture_brings_its_own_ptx_without_suffix() {
        let of = |arch: &str| architecture_flags(&[arch.to_string()]);
        assert_eq!(
            of("80"),
            ["-gencode", "arch=compute_80,code=sm_80", "-gencode", "arch=compute_80,code=compute_80"]
        );
        let suffixed =
            ["-gencode", "arch=compute_90a,code=sm_90a", "-gencode", "arch=compute_90,code=compute_90"];
        assert_eq!(of("90a"), suffixed);
    }

    #[test]
    fn lists_of_architectures() {
        assert_eq!(parse_architectures("75;8.0 90a").unwrap(), ["75", "80", "90a"]);
        for wrong in ["", "x", "9", "sm_90"] {
            assert!(parse_architectures(wrong).is_err(), "{wrong}");
        }
    }
}
