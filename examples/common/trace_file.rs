//! `--tracing`: what candle's and our spans took, in a file for chrome://tracing or Perfetto.

use std::fs::File;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use tracing_chrome::{ChromeLayerBuilder, FlushGuard};
use tracing_subscriber::prelude::*;

use super::report;

/// Begins a trace in the current folder if `wanted`. It is written out when the guard is dropped.
pub fn begin(wanted: bool) -> Result<Option<FlushGuard>> {
    if !wanted {
        return Ok(None);
    }
    let time = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let name = format!("trace-{}.json", time.as_micros());
    let file = File::create(&name).with_context(|| {
        format!("cannot write {name} here; run --tracing in a folder that can be written")
    })?;
    let (layer, guard) = ChromeLayerBuilder::new().writer(file).build();
    tracing_subscriber::registry().with(layer).init();
    report::say(format_args!("writing the trace to {name}"));
    Ok(Some(guard))
}
