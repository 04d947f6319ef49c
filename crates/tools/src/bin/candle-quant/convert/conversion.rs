//! What the options ask for.

use super::{choose, Options, To};
use crate::device;
use anyhow::{bail, Context, Result};
use candle_quant_tools::convert::{ConvertOptions, Recipe, Rule, Spec};
use std::fs;

/// Whether nothing says what tensors are to become.
pub fn is_open(options: &Options) -> bool {
    let asked = !options.format.is_empty()
        || options.bits.is_some()
        || options.recipe.is_some()
        || options.fit.is_some();
    !(asked || options.target_bpw.is_some() || options.dequantize)
}

/// What is to be done, with another format than that of the options if one is given.
pub fn conversion(options: &Options, format: Option<Spec>) -> Result<ConvertOptions> {
    let (bits, fit) = (options.target_bpw.is_some(), options.fit.is_some());
    for (is_given, is_used, what) in [
        (options.sensitivities.is_some(), bits, "--sensitivities is for --target-bpw"),
        (!options.candidates.is_empty(), bits || fit, "--candidates is for --target-bpw and --fit"),
        // (clap does not say so beside options that --fit excludes.)
        (options.context.is_some(), fit, "--context is for --fit"),
    ] {
        if is_given && !is_used {
            bail!(what);
        }
    }
    let mut conversion = match (options.dequantize, options.to, format) {
        (true, None, _) => ConvertOptions::dense(),
        (true, Some(To::Hf | To::Gguf | To::Slm1), _) => to(options, Recipe::safe(Spec::Keep))?,
        (true, Some(_), _) => {
            bail!("--dequantize is for --to hf, gguf and slm1, or without --to for the names of SRC")
        }
        (false, _, Some(format)) => to(options, with_rules(options, options.target().usual_recipe(format))?)?,
        (false, ..) => to(options, recipe(options, options.format.first().copied())?)?,
    };
    let further = if format.is_some() { &[] } else { options.format.get(1..).unwrap_or_default() };
    if !further.is_empty() && !matches!(options.to, Some(To::Uqff)) {
        bail!("several formats at once are for --to uqff");
    }
    if !further.is_empty() && options.save_recipe.is_some() {
        bail!("--save-recipe is for one format");
    }
    for format in further {
        conversion.also.push(recipe(options, Some(*format))?);
    }
    conversion.dequantize = options.dequantize;
    conversion.dtype = options.dtype;
    conversion.requantize = options.requantize;
    conversion.search = options.search;
    conversion.strict = options.strict;
    conversion.max_shard_size = options.max_shard_size;
    if !options.dequantize {
        conversion.device = device::first(options.cpu);
    }
    Ok(conversion)
}

fn to(options: &Options, recipe: Recipe) -> Result<ConvertOptions> {
    match (options.to.unwrap_or(To::Mlx), &options.name) {
        (To::Ollama, Some(name)) => Ok(ConvertOptions::ollama(recipe, name)?),
        // Nothing is written.
        (To::Ollama, None) if options.out.is_none() => Ok(ConvertOptions::ollama(recipe, "model")?),
        (To::Ollama, None) => bail!("--to ollama needs the --name of the model"),
        (_, Some(_)) => bail!("--name is for --to ollama"),
        (To::Mlx, None) => Ok(ConvertOptions::mlx(recipe)),
        (To::Uqff, None) => Ok(ConvertOptions::uqff(recipe)),
        (To::Hf, None) => Ok(ConvertOptions::hugging_face(recipe)),
        (To::Gguf, None) => Ok(ConvertOptions::gguf(recipe)),
        (To::Slm1, None) => Ok(ConvertOptions::slm1(recipe)),
    }
}

fn recipe(options: &Options, format: Option<Spec>) -> Result<Recipe> {
    let mixed = options.recipe.as_deref().filter(|name| name.starts_with("mixed_"));
    match (mixed, options.bits) {
        (Some(name), _) if options.target_bpw.is_some() => {
            bail!("{name} has its own bits: leave out --target-bpw")
        }
        (Some(name), Some(_)) => {
            bail!("{name} has its own bits: leave out --bits; --group-size may be given alone")
        }
        (None, None) if options.group_size.is_some() => {
            bail!("--group-size is for --bits, or for a mixed recipe")
        }
        _ => {}
    }
    // A mixed recipe takes the group size alone.
    let format = match (format, options.bits.or(mixed.map(|_| 4))) {
        (None, Some(bits)) => Some(format!("affine:{bits}:g{}", options.group_size.unwrap_or(64)).parse()?),
        // All that it decides is what the rules leave open, until one is chosen.
        (None, None) if options.target_bpw.is_some() || options.fit.is_some() => {
            choose::candidates(options).first().copied()
        }
        (format, _) => format,
    };
    let recipe = match &options.recipe {
        None => match format {
            Some(format) => options.target().usual_recipe(format),
            // What is packed is written as it is, if anything is.
            None => Recipe::safe(Spec::Keep),
        },
        Some(name) if Recipe::NAMES.contains(&name.as_str()) => match format {
            Some(format) => Recipe::named(name, format)?,
            None => bail!("the recipe {name} needs a --format, or --bits"),
        },
        Some(_) if format.is_some() && options.target_bpw.is_none() => {
            bail!("a recipe file has its own format: leave out --format and --bits")
        }
        Some(file) => {
            let names = Recipe::NAMES.join(", ");
            let text = fs::read_to_string(file)
                .with_context(|| format!("{file}: neither one of {names} nor a file"))?;
            Recipe::from_text(file, &text)?
        }
    };
    with_rules(options, recipe)
}

/// The recipe after the rules of the command line.
pub fn with_rules(options: &Options, recipe: Recipe) -> Result<Recipe> {
    let tensors = options.tensors.iter().map(|(glob, spec)| Rule::tensors(glob, *spec));
    let roles = options.role.iter().map(|(role, spec)| Ok(Rule::role(*role, *spec)));
    Ok(recipe.with_rules_first(tensors.chain(roles).collect::<candle_quant::Result<Vec<_>>>()?))
}
