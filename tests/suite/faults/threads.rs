//! Models and generations of several threads on one GPU: each gives the tokens that it gives alone.

use super::{answers, gpu, tiny};
use candle_core::Result;
use candle_fused::generation::Generation;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Steps of each thread.
const STEPS: usize = 10_000;

/// The tokens of a model on a thread with a handle of its own.
fn of_its_own(model: usize) -> Result<Vec<u32>> {
    let tiny = &tiny::all()?[model];
    let subject = tiny.load(&gpu())?;
    answers(STEPS, |options| subject.generation(options))
}

fn panicked<T>(thread: std::thread::Result<T>) -> T {
    thread.unwrap_or_else(|_| panic!("a thread panicked"))
}

#[test]
#[ignore = "needs the GPU for itself"]
fn two_models_on_two_threads_do_not_see_each_other() -> Result<()> {
    for pair in [[0, 1], [2, 3], [0, 0]] {
        let expected = [of_its_own(pair[0])?, of_its_own(pair[1])?];
        let start = Instant::now();
        let threads = pair.map(|model| std::thread::spawn(move || of_its_own(model)));
        for (thread, expected) in threads.into_iter().zip(expected) {
            assert!(panicked(thread.join())? == expected, "{pair:?}");
        }
        let took = start.elapsed();
        println!("faults: models {pair:?}, {STEPS} steps each: the same tokens, {took:?}");
    }
    Ok(())
}

#[test]
#[ignore = "needs the GPU for itself"]
fn two_generations_of_one_model_on_two_threads_do_not_see_each_other() -> Result<()> {
    let device = gpu();
    let model = tiny::shared(&device)?;
    let steps = || answers(STEPS, |options| Generation::new(&model, options));
    let expected = steps()?;
    std::thread::scope(|scope| {
        // This thread, on which the model was loaded, and two others.
        let others = [(); 2].map(|()| scope.spawn(steps));
        assert!(steps()? == expected, "on the thread of the model");
        for other in others {
            assert!(panicked(other.join())? == expected, "on another thread");
        }
        println!("faults: one model, three threads of {STEPS} steps: the same tokens");
        Ok(())
    })
}

/// On one thread, their steps in turns.
#[test]
#[ignore = "needs the GPU for itself"]
fn generations_of_one_thread_do_not_see_each_other() -> Result<()> {
    let device = gpu();
    let models = tiny::all()?;
    let subjects = models[..4]
        .iter()
        .map(|tiny| tiny.load(&device))
        .collect::<Result<Vec<_>>>()?;
    let alone = |index: usize| -> Result<Vec<u32>> {
        let mut generation = subjects[index].generation(&super::options(96))?;
        let mut tokens = vec![generation.extend(0, super::PROMPTS[index % 3])?];
        for _ in 0..60 {
            tokens.extend(generation.step()?.into_iter().flatten());
        }
        Ok(tokens)
    };
    let expected = (0..subjects.len()).map(alone).collect::<Result<Vec<_>>>()?;
    for _ in 0..STEPS / 60 {
        in_turns(&subjects, &expected)?;
    }
    Ok(())
}

fn in_turns(subjects: &[Box<dyn crate::subject::Subject>], expected: &[Vec<u32>]) -> Result<()> {
    let mut generations = Vec::new();
    for (index, subject) in subjects.iter().enumerate() {
        let mut generation = subject.generation(&super::options(96))?;
        let first = generation.extend(0, super::PROMPTS[index % 3])?;
        generations.push((generation, vec![first]));
    }
    for _ in 0..60 {
        for (generation, tokens) in &mut generations {
            tokens.extend(generation.step()?.into_iter().flatten());
        }
    }
    for ((_, tokens), expected) in generations.iter().zip(expected) {
        assert_eq!(tokens, expected);
    }
    Ok(())
}

/// Threads come, make a handle of their own, answer, and go, while another works.
#[test]
#[ignore = "needs the GPU for itself"]
fn threads_that_come_and_go_do_not_disturb_another() -> Result<()> {
    const GUESTS: usize = 10;
    let device = gpu();
    let model = tiny::shared(&device)?;
    let steps = || answers(1000, |options| Generation::new(&model, options));
    let expected = steps()?;
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| -> Result<usize> {
            let mut rounds = 0;
            while !over.load(Ordering::Relaxed) {
                assert!(steps()? == expected);
                rounds += 1;
            }
            Ok(rounds)
        });
        let guest = |_| {
            let guest = std::thread::spawn(|| -> Result<usize> {
                let subject = tiny::all()?[3].load(&gpu())?;
                Ok(answers(89, |options| subject.generation(options))?.len())
            });
            guest.join()
        };
        let guests: Vec<_> = (0..GUESTS).map(guest).collect();
        over.store(true, Ordering::Relaxed);
        for guest in guests {
            assert!(panicked(guest)? >= 90);
        }
        let rounds = panicked(worker.join())?;
        println!(
            "faults: {GUESTS} threads came and went beside {rounds} times 1000 steps of another"
        );
        assert!(rounds > 0);
        Ok(())
    })
}
