//! Why a step of a model is no chain of kernels.

use candle_core::Error;

/// Why there is no plan.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// A part of the model runs in candle's own operations, or in none of the kernels of a step.
    Unfused(String),
    /// Memory is short, or a tensor is not where it should be.
    Failed(Error),
}

impl Refusal {
    /// The same, of a part of the model.
    pub fn within(self, part: std::fmt::Arguments<'_>) -> Self {
        match self {
            Refusal::Unfused(why) => Refusal::Unfused(format!("{part}: {why}")),
            failed => failed,
        }
    }
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Refusal::Failed(error)
    }
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Failed(error) => error,
            Refusal::Unfused(why) => Error::msg(format!("a step cannot be written down: {why}")),
        }
    }
}

pub(crate) fn unfused<T>(why: &str) -> std::result::Result<T, Refusal> {
    Err(Refusal::Unfused(why.to_owned()))
}
