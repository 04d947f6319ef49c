//! Activations that a checkpoint wants rounded. Nothing here rounds them as it says, which is no fault of the checkpoint.

use candle_quant::checkpoint::{Checkpoint, CheckpointKind, QuantMethod};
use serde_json::Value;

/// One line about activations that the settings of a checkpoint want rounded (W8A8, W4A8, FP8); `None` if they want none.
///
/// ```
/// use candle_quant::Checkpoint;
/// use candle_quant_tools::verify::unrounded_activations;
///
/// assert_eq!(unrounded_activations(&Checkpoint::open("assets/tiny")?), None);
/// # Ok::<(), candle_quant::Error>(())
/// ```
pub fn unrounded_activations(checkpoint: &Checkpoint) -> Option<String> {
    let CheckpointKind::HuggingFace(method) = checkpoint.kind() else { return None };
    let of_config = checkpoint.config().get("quantization_config");
    let (wanted, file) = match (method, of_config) {
        (QuantMethod::CompressedTensors, Some(settings)) => (of_groups(settings)?, "config.json"),
        (QuantMethod::Fp8, _) => ("8-bit float".to_owned(), "config.json"),
        (QuantMethod::BitsAndBytes, Some(settings)) => {
            let wanted = settings.get("load_in_8bit") == Some(&Value::Bool(true));
            (wanted.then(|| "8-bit int".to_owned())?, "config.json")
        }
        (QuantMethod::ModelOpt, Some(Value::Object(settings))) => {
            let nested = settings.get("quantization").filter(|nested| nested.is_object());
            (of_modelopt(nested.or(of_config)?)?, "config.json")
        }
        (QuantMethod::ModelOpt, _) => {
            const BESIDE: &str = "hf_quant_config.json";
            let settings = checkpoint.read_json(BESIDE).ok()??;
            (of_modelopt(settings.get("quantization")?)?, BESIDE)
        }
        _ => return None,
    };
    Some(format!(
        "activations stay unrounded, although {file} wants them rounded ({wanted}): products are those of the weights' numbers"
    ))
}

/// What groups of compressed-tensors say, each thing once.
fn of_groups(settings: &Value) -> Option<String> {
    let groups = settings.get("config_groups")?.as_object()?;
    let mut all: Vec<String> = Vec::new();
    for wanted in groups.values().filter_map(|group| group.get("input_activations")?.as_object()) {
        let kind = match wanted.get("type").and_then(Value::as_str) {
            Some("float") => "float",
            _ => "int",
        };
        let wanted = match wanted.get("num_bits").and_then(Value::as_u64) {
            Some(bits) => format!("{bits}-bit {kind}"),
            None => kind.to_owned(),
        };
        if !all.contains(&wanted) {
            all.push(wanted);
        }
    }
    (!all.is_empty()).then(|| all.join(", "))
}

/// What algorithms of ModelOpt do; of single layers if they differ.
fn of_modelopt(settings: &Value) -> Option<String> {
    let layers = settings.get("quantized_layers").and_then(Value::as_object);
    let of_layers = layers.into_iter().flat_map(|layers| layers.values());
    let algorithms = std::iter::once(settings).chain(of_layers);
    let mut all: Vec<&str> = Vec::new();
    for algorithm in algorithms.filter_map(|settings| settings.get("quant_algo")?.as_str()) {
        let wanted = match algorithm {
            "NVFP4" => "4-bit float",
            "FP8" | "FP8_PER_CHANNEL_PER_TOKEN" => "8-bit float",
            _ => continue,
        };
        if !all.contains(&wanted) {
            all.push(wanted);
        }
    }
    (!all.is_empty()).then(|| all.join(", "))
}
