//! A report of a bench, for people: tables of 80 columns.

use candle_quant_tools::bench::BenchReport;
use std::io::{self, Write};

pub fn report(out: &mut impl Write, report: &BenchReport) -> io::Result<()> {
    head(out, report)?;
    if !report.prefill.is_empty() || !report.decode.is_empty() {
        texts(out, report)?;
    }
    if !report.matmuls.is_empty() {
        matmuls(out, report)?;
    }
    for text in &report.left_out {
        let context = report.settings.context;
        writeln!(out, "left out: {text}, beyond the context of {context} tokens (--context)")?;
    }
    report.notes.iter().try_for_each(|note| writeln!(out, "note: {note}"))
}

fn head(out: &mut impl Write, report: &BenchReport) -> io::Result<()> {
    let BenchReport { model, machine, settings, .. } = report;
    writeln!(out, "candle-quant {}", report.version)?;
    writeln!(out, "model: {}", model.path)?;
    writeln!(out, "kind: {}, {}", model.kind, model.model_type.as_deref().unwrap_or("unknown"))?;
    for (format, count) in &model.formats {
        writeln!(out, "weights: {count} x {format}")?;
    }
    let megabytes = model.weight_bytes as f64 / 1e6;
    writeln!(out, "size: {megabytes:.2} MB, {:.2} bits per weight", model.bits_per_weight)?;
    writeln!(out, "CPU: {}", machine.cpu)?;
    let (threads, instructions, device) = (machine.threads, &machine.instruction_set, &machine.device);
    writeln!(out, "computed by: {device}, {threads} threads, {instructions}")?;
    writeln!(
        out,
        "activations: {}, {}; KV cache: {}, {}",
        settings.dtype, settings.activations, settings.kv_cache_keys, settings.kv_cache_values
    )?;
    let peak =
        report.peak_memory_bytes.map_or("unknown".to_owned(), |peak| format!("{:.1} MB", peak as f64 / 1e6));
    writeln!(out, "load: {}; peak memory: {peak}", time(report.load_seconds))?;
    if let Some(bandwidth) = &report.read_bandwidth {
        writeln!(out, "memory: {:.1} GB/s", bandwidth.bytes_per_second / 1e9)?;
    }
    Ok(())
}

fn texts(out: &mut impl Write, report: &BenchReport) -> io::Result<()> {
    writeln!(out)?;
    writeln!(
        out,
        "{:<24} {:>10} {:>9} {:>12} {:>8} {:>10}",
        "test", "tokens/s", "deviation", "first token", "GB/s", "of memory"
    )?;
    for figure in &report.prefill {
        let (test, speed) = (format!("prefill {}", figure.tokens), figure.tokens_per_second);
        let first = time(figure.first_token_seconds.mean);
        writeln!(out, "{test:<24} {:>10.2} {:>9.2} {first:>12}", speed.mean, speed.deviation)?;
    }
    for figure in &report.decode {
        let depth = if figure.depth == 0 { String::new() } else { format!(" @ {}", figure.depth) };
        let (test, speed) = (format!("decode {}{depth}", figure.tokens), figure.tokens_per_second);
        let share = figure.share_of_bandwidth.map_or(String::new(), |share| format!("{:.0} %", share * 100.));
        let rate = figure.bytes_per_second / 1e9;
        let (mean, deviation) = (speed.mean, speed.deviation);
        writeln!(out, "{test:<24} {mean:>10.2} {deviation:>9.2} {:>12} {rate:>8.2} {share:>10}", "")?;
    }
    Ok(())
}

fn matmuls(out: &mut impl Write, report: &BenchReport) -> io::Result<()> {
    writeln!(out)?;
    writeln!(
        out,
        "{:>7} {:>6}  {:<18} {:>6} {:>4} {:>9} {:>5} {:>8} {:>8}",
        "N", "K", "format", "count", "M", "time", "dev.", "GB/s", "GFLOP/s"
    )?;
    for figure in &report.matmuls {
        let seconds = figure.seconds;
        let deviation = seconds.deviation / seconds.mean.max(f64::MIN_POSITIVE) * 100.;
        writeln!(
            out,
            "{:>7} {:>6}  {:<18} {:>6} {:>4} {:>9} {:>5} {:>8.2} {:>8.1}",
            figure.n,
            figure.k,
            figure.format,
            figure.count,
            figure.m,
            time(seconds.mean),
            format!("{deviation:.0} %"),
            figure.bytes_per_second / 1e9,
            figure.flops_per_second / 1e9
        )?;
    }
    Ok(())
}

fn time(seconds: f64) -> String {
    match seconds {
        seconds if seconds < 1e-3 => format!("{:.1} us", seconds * 1e6),
        seconds if seconds < 1. => format!("{:.2} ms", seconds * 1e3),
        seconds => format!("{seconds:.2} s"),
    }
}
