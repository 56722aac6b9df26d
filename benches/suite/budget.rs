//! How long a run may go on.

use std::time::{Duration, Instant};

/// The time that there is.
pub struct Budget(Option<Instant>);

impl Budget {
    pub fn new(seconds: Option<u64>) -> Self {
        Self(seconds.map(|s| Instant::now() + Duration::from_secs(s)))
    }

    pub fn is_spent(&self) -> bool {
        self.0.is_some_and(|end| Instant::now() > end)
    }
}
