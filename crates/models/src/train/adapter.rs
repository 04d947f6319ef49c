//! New adapters, and the variables in them.

use crate::Model;
use candle_core::{DType, Tensor, Var};
use candle_quant::nn::{AdapterSlot, Lora, LoraConfig};
use candle_quant::{Error, Result};
use globset::Glob;
use rand::rngs::ChaCha20Rng;
use rand::{RngExt, SeedableRng};

/// A trainable tensor of an adapter.
#[derive(Clone, Debug)]
pub struct Variable {
    /// The path of the module and the part: `model.layers.0.mlp.up_proj.lora_A`.
    pub name: String,
    /// The tensor, which the adapter shares: what is set here applies there.
    pub var: Var,
}

/// All linear layers and stacks of experts but the output head, as PEFT names them.
const ALL_LINEAR: &str = "all-linear";

/// Adds a new adapter, active, to modules of a model. It changes nothing yet: A has random elements of
/// ±1/√K by `seed`, the same on every machine, and B is zero.
///
/// A target is the last part of module paths (`q_proj`), a glob over whole paths (`model.layers.*.mlp.*`), or `all-linear`:
/// everything but the output head.
///
/// # Errors
/// If a target matches no module, the config is senseless, or a module has an adapter of that name.
pub fn add_adapter(
    model: &Model,
    name: &str,
    config: &LoraConfig,
    targets: &[impl AsRef<str>],
    seed: u64,
) -> Result<Vec<Variable>> {
    if config.rank == 0 || !config.alpha.is_finite() {
        return Err(Error::mismatch(
            "adapter",
            "a rank of 1 or more, and an alpha that is a number",
            format!("rank {}, alpha {}", config.rank, config.alpha),
        ));
    }
    let slots = matching(model.adapters().slots(), targets)?;
    if let Some(taken) = slots.iter().find(|slot| slot.get(name).is_some()) {
        let found = format!("`{name}` at `{}`", taken.module());
        return Err(Error::mismatch("adapter", "a name that is not taken", found));
    }
    let mut random = ChaCha20Rng::seed_from_u64(seed);
    for slot in &slots {
        slot.add(name, new_lora(slot, config, &mut random, model)?)?;
    }
    variables(model, name)
}

fn new_lora(
    slot: &AdapterSlot,
    config: &LoraConfig,
    random: &mut ChaCha20Rng,
    model: &Model,
) -> Result<Lora> {
    let [stack @ .., n, k] = slot.dims() else {
        return Err(Error::mismatch(
            "weight of an adapter",
            "[N, K] or [E, N, K]",
            format!("{:?}", slot.dims()),
        ));
    };
    let bound = (*k as f32).sqrt().recip();
    let dims = |last: [usize; 2]| [stack, &last].concat();
    let of_a = dims([config.rank, *k]);
    let values: Vec<f32> = (0..of_a.iter().product()).map(|_| random.random_range(-bound..bound)).collect();
    Ok(Lora {
        a: trainable(&Tensor::from_vec(values, of_a, model.device())?)?,
        b: trainable(&Tensor::zeros(dims([*n, config.rank]), DType::F32, model.device())?)?,
        scale: config.scale(),
        magnitude: config.dora.then(|| trainable(&slot.row_norms()?)).transpose()?,
    })
}

fn trainable(tensor: &Tensor) -> Result<Tensor> {
    Ok(Var::from_tensor(&tensor.to_dtype(DType::F32)?)?.into_inner())
}

/// The variables of an adapter in all modules, in the order of their names. An adapter that has none yet, since it was
/// loaded, becomes trainable.
///
/// # Errors
/// If no module has an adapter of that name.
pub fn variables(model: &Model, name: &str) -> Result<Vec<Variable>> {
    let mut variables = Vec::new();
    for slot in model.adapters().slots() {
        let Some(mut lora) = slot.get(name) else { continue };
        let mut is_new = false;
        let parts = [
            ("lora_A", Some(&mut lora.a)),
            ("lora_B", Some(&mut lora.b)),
            ("magnitude", lora.magnitude.as_mut()),
        ];
        for (part, tensor) in parts.into_iter().filter_map(|(part, tensor)| Some((part, tensor?))) {
            if !tensor.is_variable() {
                is_new = true;
                *tensor = trainable(tensor)?;
            }
            let name = format!("{}.{part}", slot.module());
            variables.push(Variable { name, var: Var::from_tensor(tensor)? });
        }
        if is_new {
            slot.remove(name);
            slot.add(name, lora)?;
        }
    }
    if variables.is_empty() {
        return Err(Error::mismatch("adapter", format!("`{name}` in some module"), "none of that name"));
    }
    Ok(variables)
}

/// Makes constants of an adapter's variables, as they are: without them, all of a model runs in one call again.
pub(super) fn freeze(model: &Model, name: &str) -> Result<()> {
    for slot in model.adapters().slots() {
        if let Some(Lora { a, b, scale, magnitude }) = slot.remove(name) {
            let magnitude = magnitude.map(|magnitude| magnitude.detach());
            slot.add(name, Lora { a: a.detach(), b: b.detach(), scale, magnitude })?;
        }
    }
    Ok(())
}

/// The slots that any of the targets means.
fn matching(slots: Vec<AdapterSlot>, targets: &[impl AsRef<str>]) -> Result<Vec<AdapterSlot>> {
    let last = |slot: &AdapterSlot| slot.module().rsplit('.').next().unwrap_or_default().to_owned();
    let mut is_meant = vec![false; slots.len()];
    for target in targets.iter().map(AsRef::as_ref) {
        let glob = Glob::new(target).map_err(|error| {
            Error::mismatch(
                "target of an adapter",
                "the name of a module, a glob, or `all-linear`",
                error.to_string(),
            )
        })?;
        let glob = glob.compile_matcher();
        let matches = |slot: &AdapterSlot| match target {
            ALL_LINEAR => slot.module() != "lm_head",
            _ => glob.is_match(slot.module()) || glob.is_match(last(slot)),
        };
        let mut found = false;
        for (slot, is_meant) in slots.iter().zip(&mut is_meant).filter(|(slot, _)| matches(slot)) {
            (*is_meant, found) = (true, !slot.module().is_empty());
        }
        if !found {
            return Err(nothing_matches(target, slots.iter().map(last)));
        }
    }
    let meant: Vec<_> = slots.iter().zip(is_meant).filter(|(_, is_meant)| *is_meant).collect();
    match meant.is_empty() {
        true => Err(nothing_matches("", slots.iter().map(last))),
        false => Ok(meant.into_iter().map(|(slot, _)| slot.clone()).collect()),
    }
}

fn nothing_matches(target: &str, names: impl Iterator<Item = String>) -> Error {
    let mut names: Vec<_> = names.collect();
    names.sort();
    names.dedup();
    let expected = format!("a module of the model, one of {}, or a glob over their paths", names.join(", "));
    Error::mismatch("target of an adapter", expected, format!("`{target}`"))
}
