//! When tokens came, and what that makes of tokens per second.

use std::time::Instant;

use common::comparison::{median, percentile};
use serde::{Deserialize, Serialize};

/// One answer.
pub struct Story {
    /// When it was asked for.
    pub asked: Instant,
    /// When news of it came; a piece of news may bring several tokens.
    pub news: Vec<Instant>,
    /// Its tokens.
    pub tokens: usize,
}

/// Tokens per second and the time to the first token, each the median of its rounds.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Rates {
    /// While all answers are under way; none if there was no such time.
    pub busy: Option<f64>,
    /// From the first request to the last token.
    pub whole: Option<f64>,
    /// Seconds from a request to its first token.
    pub first_p50: Option<f64>,
    pub first_p99: Option<f64>,
    /// Of each round.
    busy_rounds: Vec<f64>,
    whole_rounds: Vec<f64>,
}

impl Rates {
    /// A rate that was measured elsewhere, while all are under way.
    pub fn given(rate: f64) -> Self {
        Self {
            busy: Some(rate),
            ..Default::default()
        }
    }

    /// Of rounds in which all answers were asked for at once.
    pub fn of(rounds: &[Vec<Story>]) -> Self {
        let busy_rounds: Vec<_> = rounds.iter().filter_map(|round| busy(round)).collect();
        let whole_rounds: Vec<_> = rounds.iter().filter_map(|round| whole(round)).collect();
        let first = rounds.iter().flatten().filter_map(|story| {
            let first = story.news.first()?;
            Some(first.duration_since(story.asked).as_secs_f64())
        });
        let first: Vec<_> = first.collect();
        let some = |values: &Vec<f64>| (!values.is_empty()).then(|| median(values.clone()));
        Self {
            busy: some(&busy_rounds),
            whole: some(&whole_rounds),
            first_p50: some(&first),
            first_p99: (!first.is_empty()).then(|| percentile(first, 99.)),
            busy_rounds,
            whole_rounds,
        }
    }

    /// These over others: the shares that both have.
    pub fn over(&self, others: &Self) -> Self {
        let share = |a: Option<f64>, b: Option<f64>| a.zip(b).map(|(a, b)| a / b);
        Self {
            busy: share(self.busy, others.busy),
            whole: share(self.whole, others.whole),
            ..Default::default()
        }
    }

    pub fn line(&self) -> String {
        let rate = |rate: Option<f64>| rate.map_or("-".to_owned(), |r| format!("{r:.0}"));
        let first = match (self.first_p50, self.first_p99) {
            (Some(p50), Some(p99)) => {
                format!("; first token {:.1} ms p50 {:.1} p99", p50 * 1e3, p99 * 1e3)
            }
            _ => String::new(),
        };
        format!(
            "{} tokens/s while all are under way, {} in all{first}",
            rate(self.busy),
            rate(self.whole)
        )
    }
}

/// What [`Rates::over`] has found.
pub fn line_of_shares(shares: &Rates) -> Option<String> {
    let busy = shares.busy?;
    let whole = shares.whole;
    let whole = whole.map_or_else(String::new, |w| format!(", {:.1} % in all", w * 100.));
    Some(format!(
        "over HTTP {:.1} % of the engine alone while all are under way{whole}",
        busy * 100.
    ))
}

/// From when the last answer has begun to when the first has ended.
fn busy(round: &[Story]) -> Option<f64> {
    let firsts = round.iter().map(|story| story.news.first().copied());
    let from = firsts.collect::<Option<Vec<_>>>()?.into_iter().max()?;
    let lasts = round.iter().filter_map(|story| story.news.last().copied());
    let to = lasts.min().filter(|to| *to > from)?;
    let within = |story: &Story| {
        let news = story.news.iter().filter(|at| **at > from && **at <= to);
        news.count() as f64 * story.tokens as f64 / story.news.len() as f64
    };
    let tokens: f64 = round.iter().map(within).sum();
    Some(tokens / to.duration_since(from).as_secs_f64())
}

fn whole(round: &[Story]) -> Option<f64> {
    let from = round.iter().map(|story| story.asked).min()?;
    let to = round.iter().filter_map(|story| story.news.last()).max()?;
    let tokens: usize = round.iter().map(|story| story.tokens).sum();
    Some(tokens as f64 / to.duration_since(from).as_secs_f64())
}
