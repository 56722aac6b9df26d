//! The server as its clients see it, over a tiny model with random weights.

mod answers;
mod draws;
mod errors;
mod limits;
mod load_rates;
mod model;
mod pages;
#[cfg(unix)]
mod program;
mod shutdown;
mod streams;
mod support;
