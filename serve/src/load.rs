//! From a command line to a server with a model in it.

use std::sync::Arc;
use std::time::Instant;

use anyhow::Result;
use common::pip::Package;
use common::report::seconds;
use common::source::{self, DEFAULT_MODEL, SourceOptions};
use common::{fused, weights};

use crate::app::{App, Settings};
use crate::args::Args;
use crate::metrics::Metrics;
use crate::worker::Worker;

/// Finds the model that `args` name, starts its engine, and makes a server of it that asks clients for `key`; with it
/// comes a line that says what was loaded.
///
/// # Errors
/// If there is no such model, or its engine cannot be made.
pub fn load(args: &Args, key: Option<String>) -> Result<(Arc<App>, String)> {
    let options = SourceOptions {
        default_model: DEFAULT_MODEL.to_owned(),
        package: Some(Package::default()),
        ..SourceOptions::from_env()
    };
    let (model, revision) = (args.model.model.as_deref(), args.model.revision.as_deref());
    let located = source::locate(model, revision, &options)?;
    let located = match args.model.mmap {
        true => located.mapped()?,
        false => located,
    };
    let begun = Instant::now();
    let weights = weights::open(&located.files)?;
    let quantize = &args.model.quantize;
    let stored = quantize.describe().unwrap_or_else(|| weights.stored_as());
    let text = weights.text_meanwhile();
    let metrics = Arc::new(Metrics::default());
    let (options, of_model) = (args.options(), args.model.clone());
    let make = move || {
        let recipe = of_model.quantize.recipe();
        let (dtype, device) = (of_model.dtype, of_model.device()?);
        let model = fused::load(weights, dtype, &device, of_model.fusion(), recipe.as_ref())?;
        model.engine(&options)
    };
    let worker = Worker::start(make, args.engine.page, Arc::clone(&metrics))?;
    let loaded = format!(
        "{} ({stored}, {}), {} requests at once of up to {} tokens, loaded in {}",
        located.name,
        located.origin,
        args.engine.sequences,
        worker.room(),
        seconds(begun.elapsed()),
    );
    let settings = Settings {
        name: args.name.clone().unwrap_or(located.name),
        key,
        sequences: args.engine.sequences,
        max_queue: args.limits.max_queue as usize,
        max_body: args.limits.max_body,
        timeout: args.limits.timeout,
        local_only: args.host.is_loopback(),
    };
    Ok((App::new(settings, text.wait()?, worker, metrics)?, loaded))
}
