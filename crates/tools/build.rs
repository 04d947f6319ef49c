//! With the feature `cuda`, the command line starts on machines without CUDA, too.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "cuda")]
    candle_quant_delay_load::link();
}
