//! How long prompts and answers are: distributions that the command line names.

use rand::Rng;
use rand_distr::{Distribution, LogNormal};
use std::fmt;
use std::str::FromStr;

/// The most tokens that a distribution may reach.
const LIMIT: usize = 1 << 20;

/// Standard deviations at which a log-normal distribution is cut on both sides.
const CUT: f64 = 3.;

/// A distribution of lengths in tokens, as `fixed:128`, `uniform:32..224` or `lognormal:200,0.8`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Lengths {
    /// Always the same.
    Fixed(usize),
    /// Whole numbers from the first to the second, both included.
    Uniform(usize, usize),
    /// `exp` of a normal distribution with mean `ln(median)` and standard deviation `sigma`, rounded, and cut at three
    /// of those.
    LogNormal { median: f64, sigma: f64 },
}

impl Lengths {
    /// A length, at least 1.
    pub fn draw(&self, rng: &mut impl Rng) -> usize {
        match *self {
            Self::Fixed(length) => length,
            Self::Uniform(least, most) => rng.random_range(least..=most),
            Self::LogNormal { median, sigma } => {
                let distribution = LogNormal::new(median.ln(), sigma).expect("checked by from_str");
                let cut = (CUT * sigma).exp();
                let drawn: f64 = distribution.sample(rng);
                (drawn.clamp(median / cut, median * cut).round() as usize).max(1)
            }
        }
    }

    /// The longest that is drawn.
    pub fn most(&self) -> usize {
        match *self {
            Self::Fixed(length) | Self::Uniform(_, length) => length,
            Self::LogNormal { median, sigma } => {
                ((median * (CUT * sigma).exp()).round() as usize).max(1)
            }
        }
    }

    pub fn is_fixed(&self) -> bool {
        matches!(self, Self::Fixed(_))
    }
}

impl fmt::Display for Lengths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(length) => write!(f, "fixed:{length}"),
            Self::Uniform(least, most) => write!(f, "uniform:{least}..{most}"),
            Self::LogNormal { median, sigma } => write!(f, "lognormal:{median},{sigma}"),
        }
    }
}

impl FromStr for Lengths {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (kind, numbers) = text.split_once(':').unwrap_or((text, ""));
        let lengths = match kind {
            "fixed" => Self::Fixed(length(numbers)?),
            "uniform" => {
                let ends = numbers.split_once("..");
                let (least, most) =
                    ends.ok_or("expected the least and the most, as uniform:32..224")?;
                let (least, most) = (length(least)?, length(most)?);
                if least > most {
                    return Err(format!("the least, {least}, is above the most, {most}"));
                }
                Self::Uniform(least, most)
            }
            "lognormal" => {
                let both = numbers.split_once(',');
                let (median, sigma) =
                    both.ok_or("expected the median and sigma, as lognormal:200,0.8")?;
                Self::LogNormal {
                    median: length(median)? as f64,
                    sigma: sigma_of(sigma)?,
                }
            }
            _ => {
                return Err(
                    "expected fixed:N, uniform:LEAST..MOST or lognormal:MEDIAN,SIGMA".to_owned(),
                );
            }
        };
        match lengths.most() {
            most if most > LIMIT => Err(format!("{most} tokens; the most is {LIMIT}")),
            _ => Ok(lengths),
        }
    }
}

/// One length.
fn length(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(length) if length > 0 => Ok(length),
        _ => Err(format!("`{text}` is no number of tokens above 0")),
    }
}

fn sigma_of(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(sigma) if (0. ..=4.).contains(&sigma) => Ok(sigma),
        _ => Err(format!("sigma `{text}` is no number from 0 to 4")),
    }
}

/// Tokens that prompts begin with, and the share of the prompts that do: `512`, or `512:0.5` for half of them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SharedPrefix {
    pub tokens: usize,
    pub share: f64,
}

impl fmt::Display for SharedPrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.tokens, self.share)
    }
}

impl FromStr for SharedPrefix {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (tokens, share) = text.split_once(':').unwrap_or((text, "1"));
        let tokens = length(tokens)?;
        if tokens > LIMIT {
            return Err(format!("{tokens} tokens; the most is {LIMIT}"));
        }
        match share.parse() {
            Ok(share) if share > 0. && share <= 1. => Ok(Self { tokens, share }),
            _ => Err(format!(
                "the share `{share}` is no number above 0 and up to 1"
            )),
        }
    }
}

/// The share of the offline throughput at which requests arrive.
///
/// # Errors
/// Where the number is not above 0 and up to 10.
pub fn load(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(load) if load > 0. && load <= 10. => Ok(load),
        _ => Err(format!(
            "`{text}` is no number above 0 and up to 10, as 0.7"
        )),
    }
}
