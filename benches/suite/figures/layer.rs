//! The steps of a layer.

use super::model::ModelRun;
use crate::form::Form;
use crate::stats::Times;
use serde::{Deserialize, Serialize};

/// A layer of a model, and its head.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Layer {
    pub model: String,
    pub format: String,
    /// Sequences side by side, and the keys that each of them sees.
    pub rows: usize,
    pub context: usize,
    pub layers: usize,
    /// The fused steps with what they replace.
    pub groups: Vec<Group>,
    /// The final norm and the product behind it, once for a token.
    pub head: Group,
    /// What so many smallest ops in a row cost: a kernel, a fused layer, a stock layer.
    pub chains: Vec<Chain>,
    /// Seconds of a token by the whole model, where it was measured.
    pub stock_token: Option<f64>,
    pub fused_token: Option<f64>,
}

/// A fused step.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Group {
    pub name: String,
    pub stock: Vec<Step>,
    pub fused: Times,
}

/// One of candle's operations.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Step {
    pub name: String,
    pub times: Times,
}

/// Ops without work, one behind the other.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Chain {
    pub ops: usize,
    pub seconds: f64,
    /// Of the host, on a GPU.
    pub host: Option<f64>,
}

impl Group {
    pub fn stock(&self) -> f64 {
        self.stock.iter().map(|step| step.times.median).sum()
    }
}

impl Layer {
    pub fn stock(&self) -> f64 {
        self.groups.iter().map(Group::stock).sum()
    }

    pub fn fused(&self) -> f64 {
        self.groups.iter().map(|group| group.fused.median).sum()
    }

    /// Looks up what a token took, for the sides that do not have it yet.
    pub fn take_tokens(&mut self, models: &[ModelRun]) {
        let token = |form| {
            let same = |run: &&ModelRun| {
                run.model == self.model && run.format == self.format && run.form == form
            };
            models.iter().find(same).map(|run| run.token.median)
        };
        let stock = token(Form::Stock);
        let fused = token(Form::Graph).or(token(Form::Eager));
        self.stock_token = self.stock_token.or(stock);
        self.fused_token = self.fused_token.or(fused);
    }

    /// All layers and the head.
    pub fn stock_sum(&self) -> f64 {
        self.layers as f64 * self.stock() + self.head.stock()
    }

    pub fn fused_sum(&self) -> f64 {
        self.layers as f64 * self.fused() + self.head.fused.median
    }
}
