//! An OpenAI-compatible server over [`candle_fused::serving::Engine`].
//!
//! [`program`] is the whole of it: [`load`] finds a model and starts its engine, [`server`] takes connections until a
//! signal comes.
//!
//! A call's way: [`app`] checks its key and finds its path, [`api`] reads its body ([`request`], [`conversation`]) and
//! hands the engine's thread ([`worker`]) a request for each answer, with what holds it to a JSON schema
//! ([`vocabulary`]). Tokens come back by a channel for each, become text ([`answer`]) and go out as one body or as a
//! stream ([`response`], [`logprobs`]). Wherever a client goes away, the receivers of its tokens are dropped, and the
//! thread cancels its requests.

pub mod answer;
pub mod api;
pub mod app;
pub mod args;
pub mod conversation;
pub mod error;
pub mod load;
pub mod logprobs;
pub mod metrics;
pub mod program;
pub mod request;
pub mod response;
pub mod server;
pub mod vocabulary;
pub mod worker;
