//! From a command line to a server with a model in it.

use std::sync::Arc;
use std::time::Instant;

use anyhow::Result;
use candle_fused::serving::{Engine, Options};
use common::args::ModelArgs;
use common::pip::Package;
use common::report::seconds;
use common::source::{self, DEFAULT_MODEL, SourceOptions};
use common::weights::{self, Weights};
use common::{fused, gpu};

use crate::app::{App, Settings};
use crate::args::Args;
use crate::metrics::Metrics;
use crate::worker::Worker;

/// A model that was found.
struct Found {
    name: String,
    origin: String,
    weights: Weights,
}

/// The model that `args` name.
fn find(args: &Args) -> Result<Found> {
    let options = SourceOptions {
        default_model: DEFAULT_MODEL.to_owned(),
        package: Some(Package::default()),
        ..SourceOptions::from_env()
    };
    let (model, revision) = (args.model.model.as_deref(), args.model.revision.as_deref());
    let located = match args.shape {
        Some(shape) => shape.located(),
        None => source::locate(model, revision, &options)?,
    };
    let located = match args.model.mmap {
        true => located.mapped()?,
        false => located,
    };
    Ok(Found {
        weights: weights::open(&located.files)?.with_compute_dtype(args.model.compute_dtype)?,
        name: located.name,
        origin: located.origin,
    })
}

/// An engine over `weights`, for the thread that asks for it.
fn start(weights: Weights, of_model: &ModelArgs, options: &Options) -> Result<Engine> {
    let recipe = of_model.quantize.recipe();
    let (dtype, device) = (of_model.dtype, of_model.device()?);
    gpu::tune(&device, true)?;
    let model = fused::load(weights, dtype, &device, of_model.fusion(), recipe.as_ref())?;
    model.engine(options)
}

/// The engine alone of the server that `args` ask for, with the size of its model's vocabulary.
///
/// # Errors
/// If there is no such model, or its engine cannot be made.
pub fn engine(args: &Args) -> Result<(Engine, usize)> {
    let weights = find(args)?.weights;
    let vocab = weights.vocab_size()?;
    Ok((start(weights, &args.model, &args.options())?, vocab))
}

/// Finds the model that `args` name, starts its engine, and makes a server of it that asks clients for `key`; with it
/// comes a line that says what was loaded.
///
/// # Errors
/// If there is no such model, or its engine cannot be made.
pub fn load(args: &Args, key: Option<String>) -> Result<(Arc<App>, String)> {
    let Found {
        name,
        origin,
        weights,
    } = find(args)?;
    let begun = Instant::now();
    let quantize = &args.model.quantize;
    let stored = quantize.describe().unwrap_or_else(|| weights.stored_as());
    let text = weights.text_meanwhile();
    let metrics = Arc::new(Metrics::default());
    let (options, of_model) = (args.options(), args.model.clone());
    let make = move || start(weights, &of_model, &options);
    let worker = Worker::start(make, args.engine.page, Arc::clone(&metrics))?;
    let loaded = format!(
        "{name} ({stored}, {origin}), {} requests at once of up to {} tokens, loaded in {}",
        args.engine.sequences,
        worker.room(),
        seconds(begun.elapsed()),
    );
    let settings = Settings {
        name: args.name.clone().unwrap_or(name),
        key,
        sequences: args.engine.sequences,
        max_queue: args.limits.max_queue as usize,
        max_body: args.limits.max_body,
        timeout: args.limits.timeout,
        local_only: args.host.is_loopback(),
    };
    Ok((App::new(settings, text.wait()?, worker, metrics)?, loaded))
}
