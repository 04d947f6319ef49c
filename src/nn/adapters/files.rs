//! Adapters of a model from files, and to them.

use super::modules::{expert_module, slots_of, stack_module, Place};
use super::{AdapterSlot, Adapters, Lora};
use crate::checkpoint::{write_adapter, AdapterFile, AdapterFormat, LoraTensors, StoredLora};
use crate::{Error, Result};
use candle_core::{Device, IndexOp, Tensor};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

/// How many modules a message names.
const NAMED: usize = 8;

/// What a file has for a slot.
struct Contribution<'a> {
    module: &'a str,
    place: Place,
    stored: &'a StoredLora,
}

impl Adapters {
    /// Adds an adapter from a file to the layers of its modules, active, under this name. A rank of several takes its part
    /// of it; all have to add it.
    ///
    /// Experts are found by the names of Hugging Face and of mlx-lm, whatever those of the checkpoint are; an expert that
    /// the file lacks is not changed.
    ///
    /// # Errors
    /// If the model lacks one of the modules, shapes do not fit, or the name is taken. No layer has it then.
    pub fn load(&self, name: &str, file: &AdapterFile) -> Result<()> {
        let mut slots = BTreeMap::<String, (AdapterSlot, Vec<Contribution>)>::new();
        let mut unknown = Vec::new();
        for (module, stored) in file.loras() {
            let places = slots_of(self, module);
            if places.is_empty() {
                unknown.push(module.as_str());
            }
            for (slot, place) in places {
                let entry = slots.entry(slot.module().to_owned()).or_insert_with(|| (slot, Vec::new()));
                entry.1.push(Contribution { module, place, stored });
            }
        }
        if !unknown.is_empty() {
            return Err(self.unknown(file, &unknown));
        }
        if self.slots().iter().any(|slot| slot.get(name).is_some()) {
            return Err(Error::mismatch("adapter", "a name that is not taken", format!("`{name}` again")));
        }
        let add = |(slot, of_slot): &(AdapterSlot, Vec<Contribution>)| {
            let lora = part(slot, whole(file, slot, of_slot)?)?;
            slot.add(name, lora)
        };
        slots.values().try_for_each(add).inspect_err(|_| {
            self.remove(name);
        })
    }

    fn unknown(&self, file: &AdapterFile, modules: &[&str]) -> Error {
        let named = modules.iter().take(NAMED).map(|module| format!("`{module}`")).collect::<Vec<_>>();
        let more = match modules.len().saturating_sub(NAMED) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let example =
            self.slots().first().map_or(String::new(), |slot| format!(", such as `{}`", slot.module()));
        let problem = format!(
            "it has adapters of {}{more}, and the model has no linear layer of such a name, but {} others{example}",
            named.join(", "),
            self.slots().len(),
        );
        Error::file(file.path(), problem, "use the model that it was trained for")
    }

    /// Writes an adapter to a directory, for PEFT or mlx-lm: its config, and its tensors in F32.
    ///
    /// PEFT has one module for each expert, so that a stack becomes as many modules as it has experts.
    ///
    /// # Errors
    /// If no layer has an adapter of that name, the model is one rank's part, or a file can't be written.
    pub fn save(&self, name: &str, dir: impl AsRef<Path>, format: AdapterFormat) -> Result<()> {
        let mut loras = BTreeMap::new();
        for slot in self.slots() {
            let Some(Lora { a, b, scale, magnitude }) = slot.get(name) else { continue };
            if !slot.is_whole() {
                return Err(Error::Unsupported {
                    what: format!("saving an adapter of one rank's part (`{}`)", slot.module()),
                    remedy: "load the whole model, with the adapter".to_string(),
                });
            }
            let module = slot.module();
            match (slot.dims(), format) {
                (&[experts, ..], AdapterFormat::Peft) if slot.dims().len() == 3 => {
                    for expert in 0..experts {
                        let Some(module) = expert_module(module, expert) else { continue };
                        let (a, b) = (a.i(expert)?, b.i(expert)?);
                        loras.insert(module, LoraTensors { a, b, magnitude: None, scale });
                    }
                }
                ([_, _, _], AdapterFormat::MlxLm) => {
                    loras.insert(stack_module(module), LoraTensors { a, b, magnitude, scale });
                }
                _ => drop(loras.insert(module.to_owned(), LoraTensors { a, b, magnitude, scale })),
            }
        }
        if loras.is_empty() {
            return Err(Error::mismatch("adapter to save", "the name of one", format!("`{name}`")));
        }
        write_adapter(dir, format, &loras)
    }
}

const REMEDY: &str = "use the model that it was trained for";

/// The adapter of a whole weight.
fn whole(file: &AdapterFile, slot: &AdapterSlot, of_slot: &[Contribution]) -> Result<Lora> {
    let device = slot.device();
    if let [Contribution { module, place, stored }] = of_slot {
        if let Place::Whole | Place::Rows(_) = place {
            let mut dims = slot.dims().to_vec();
            if let (Place::Rows(_), [_, n, _]) = (place, dims.as_mut_slice()) {
                // Gate and up have as many rows.
                *n = n.saturating_mul(2);
            }
            check(file, module, stored, &dims)?;
            let LoraTensors { a, b, magnitude, scale } = stored.load(&device)?;
            let b = match place {
                Place::Rows(rows) => b.narrow(1, rows.start, rows.len())?.contiguous()?,
                Place::Whole | Place::Expert(_) => b,
            };
            return Ok(Lora { a, b, scale, magnitude });
        }
    }
    of_experts(file, slot, of_slot, &device)
}

/// A stack of the adapters of single experts, zeros where there is none.
fn of_experts(
    file: &AdapterFile,
    slot: &AdapterSlot,
    of_slot: &[Contribution],
    device: &Device,
) -> Result<Lora> {
    let (&[experts, n, k], Some(first)) = (slot.dims(), of_slot.first()) else {
        return Err(Error::file(file.path(), format!("two adapters of `{}`", slot.module()), REMEDY));
    };
    let (rank, scale) = (first.stored.rank(), first.stored.scale());
    let mut loras = BTreeMap::new();
    for Contribution { module, place, stored } in of_slot {
        check(file, module, stored, &[n, k])?;
        if (stored.rank(), stored.scale(), stored.is_dora()) != (rank, scale, false) {
            let expected = format!("LoRA of rank {rank} and scale {scale} for all experts of a layer");
            let kind = if stored.is_dora() { "DoRA" } else { "LoRA" };
            let found = format!("{kind} of rank {} and scale {}", stored.rank(), stored.scale());
            return Err(Error::tensor(file.path(), *module, expected, found, "train it so"));
        }
        let twice = match place {
            Place::Expert(expert) => loras.insert(*expert, stored.load(device)?).is_some(),
            Place::Whole | Place::Rows(_) => true,
        };
        if twice {
            return Err(Error::file(file.path(), format!("two adapters of `{module}`"), REMEDY));
        }
    }
    let zeros = |rows, columns| Tensor::zeros((rows, columns), candle_core::DType::F32, device);
    let each = (0..experts).map(|expert| match loras.remove(&expert) {
        Some(LoraTensors { a, b, .. }) => Ok((a, b)),
        None => Ok((zeros(rank, k)?, zeros(n, rank)?)),
    });
    let (a, b): (Vec<_>, Vec<_>) = each.collect::<Result<Vec<_>>>()?.into_iter().unzip();
    Ok(Lora { a: Tensor::stack(&a, 0)?, b: Tensor::stack(&b, 0)?, scale, magnitude: None })
}

fn check(file: &AdapterFile, module: &str, stored: &StoredLora, dims: &[usize]) -> Result<()> {
    match stored.dims() == dims {
        true => Ok(()),
        false => {
            let expected = format!("an adapter of a weight {dims:?}");
            let found = format!("one of {:?}", stored.dims());
            Err(Error::tensor(file.path(), module, expected, found, REMEDY))
        }
    }
}

/// What of an adapter of the whole weight belongs to the slot's part.
fn part(slot: &AdapterSlot, lora: Lora) -> Result<Lora> {
    let (Some(columns), Some(rows)) = (slot.part().last(), slot.part().iter().rev().nth(1)) else {
        return Ok(lora);
    };
    let experts = slot.part().iter().rev().nth(2);
    let narrow = |tensor: Tensor, dim: usize, range: &Range<usize>| -> candle_core::Result<Tensor> {
        let tensor = match experts {
            Some(experts) => tensor.narrow(0, experts.start, experts.len())?,
            None => tensor,
        };
        tensor.narrow(dim, range.start, range.len())?.contiguous()
    };
    let (row, column) = if experts.is_some() { (1, 2) } else { (0, 1) };
    Ok(Lora {
        a: narrow(lora.a, column, columns)?,
        b: narrow(lora.b, row, rows)?,
        scale: lora.scale,
        magnitude: lora.magnitude.map(|magnitude| narrow(magnitude, row, rows)).transpose()?,
    })
}
