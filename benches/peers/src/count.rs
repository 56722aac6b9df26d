//! One decode step or one prompt of one side, in a function that a profiler can be told to watch.

use crate::args::PREFILL;
use crate::model::Sequence;
use crate::plan::{POSITIONS, TEXT};
use crate::serve::Side;
use anyhow::{Result, ensure};
use clap::ValueEnum;

/// What runs in [`counted`].
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// One token behind 64.
    Decode,
    /// A prompt of 512 tokens.
    Prefill,
}

#[derive(clap::Args)]
pub struct Count {
    #[command(flatten)]
    side: Side,
    #[arg(long, value_enum)]
    part: Part,
}

impl Count {
    pub fn run(&self) -> Result<()> {
        let model = self.side.load()?;
        let text = model.tokens(TEXT)?;
        ensure!(text.len() > PREFILL, "the text has {} tokens", text.len());
        let mut sequence = model.open(POSITIONS)?;
        // What is made at the first call is made here.
        let token = sequence.read(0, &text[..64])?;
        let next = sequence.read(64, &[token])?;
        // Counting slows everything down: count.sh turns it on here.
        println!("ready");
        std::io::stdin().read_line(&mut String::new())?;
        let last = match self.part {
            Part::Decode => counted(&mut *sequence, 65, &[next])?,
            Part::Prefill => counted(&mut *sequence, 0, &text[..PREFILL])?,
        };
        println!("{last}");
        Ok(())
    }
}

/// What is counted: a name of its own that the linker keeps.
#[unsafe(no_mangle)]
#[inline(never)]
fn counted(sequence: &mut dyn Sequence, position: usize, ids: &[u32]) -> Result<u32> {
    sequence.read(position, ids)
}
