//! How the benchmark of serving reads distributions of lengths, and what it draws from them.

#[path = "../../benches/suite/lengths.rs"]
mod lengths;

use lengths::{Lengths, SharedPrefix, load};
use rand::SeedableRng;
use rand::rngs::StdRng;

fn parse(text: &str) -> Lengths {
    text.parse().expect(text)
}

#[test]
fn distributions_are_read_and_written() {
    for (text, expected) in [
        ("fixed:128", Lengths::Fixed(128)),
        ("uniform:32..224", Lengths::Uniform(32, 224)),
        (
            "lognormal:200,0.8",
            Lengths::LogNormal {
                median: 200.,
                sigma: 0.8,
            },
        ),
    ] {
        assert_eq!(parse(text), expected);
        assert_eq!(expected.to_string(), text);
    }
}

#[test]
fn what_is_no_distribution_is_named() {
    for (text, part) in [
        ("128", "expected fixed:N"),
        ("normal:3,4", "expected fixed:N"),
        ("fixed:0", "`0`"),
        ("fixed:many", "`many`"),
        ("fixed:2000000", "the most is 1048576"),
        ("uniform:32", "uniform:32..224"),
        ("uniform:9..8", "above the most"),
        ("uniform:0..8", "`0`"),
        ("lognormal:200", "lognormal:200,0.8"),
        ("lognormal:200,-1", "sigma `-1`"),
        ("lognormal:200,NaN", "sigma `NaN`"),
        ("lognormal:100000,3", "the most is 1048576"),
    ] {
        let error = text.parse::<Lengths>().expect_err(text);
        assert!(error.contains(part), "{text}: {error}");
    }
}

#[test]
fn draws_stay_between_the_ends() {
    let rng = &mut StdRng::seed_from_u64(3);
    for text in [
        "fixed:7",
        "uniform:3..11",
        "lognormal:40,0.7",
        "lognormal:1,2",
        "lognormal:9,0",
    ] {
        let lengths = parse(text);
        let mut drawn: Vec<_> = (0..2000).map(|_| lengths.draw(rng)).collect();
        drawn.sort_unstable();
        assert!(drawn[0] >= 1, "{text}: {}", drawn[0]);
        assert!(drawn[1999] <= lengths.most(), "{text}: {}", drawn[1999]);
        assert_eq!(
            drawn[0] == drawn[1999],
            lengths.is_fixed() || text.ends_with(",0"),
            "{text}"
        );
        if text == "lognormal:40,0.7" {
            assert!((36..=44).contains(&drawn[1000]), "{}", drawn[1000]);
        }
    }
}

#[test]
fn a_prefix_has_a_share_of_the_prompts() {
    let prefix = |text: &str| text.parse::<SharedPrefix>();
    let expected = |tokens, share| Ok(SharedPrefix { tokens, share });
    assert_eq!(prefix("512"), expected(512, 1.));
    assert_eq!(prefix("512:0.5"), expected(512, 0.5));
    assert_eq!(
        prefix("512:0.5").map(|p| p.to_string()),
        Ok("512:0.5".to_owned())
    );
    for (text, part) in [
        ("0", "`0`"),
        ("2000000", "the most is"),
        ("512:0", "the share `0`"),
        ("512:1.5", "the share `1.5`"),
    ] {
        let error = prefix(text).expect_err(text);
        assert!(error.contains(part), "{text}: {error}");
    }
}

#[test]
fn a_load_is_above_nothing() {
    assert_eq!(load("0.7"), Ok(0.7));
    for text in ["0", "-1", "11", "NaN", "much"] {
        assert!(
            load(text).is_err_and(|error| error.contains(text)),
            "{text}"
        );
    }
}
