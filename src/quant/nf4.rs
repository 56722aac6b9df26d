//! NF4: codes of 4 bits that stand for the quantiles of a normal distribution (QLoRA, Dettmers et al. 2023), as
//! bitsandbytes has them.

/// The value of each code.
pub(crate) const TABLE: [f32; 16] = [
    -1.0,
    -0.6961928,
    -0.52507305,
    -0.3949175,
    -0.28444138,
    -0.18477343,
    -0.091050036,
    0.0,
    0.0795803,
    0.1609302,
    0.2461123,
    0.33791524,
    0.44070983,
    0.562617,
    0.72295684,
    1.0,
];

/// The value of a code.
pub(crate) fn to_f32(code: u8) -> f32 {
    TABLE[usize::from(code & 15)]
}

/// The code nearest to a number, the lower of two.
#[inline(always)]
pub(crate) fn from_f32(value: f32) -> u8 {
    let mut code = 0;
    for pair in TABLE.windows(2) {
        code += u8::from(value > (pair[0] + pair[1]) / 2.);
    }
    code
}

#[cfg(test)]
mod tests {
    use super::{TABLE, from_f32, to_f32};

    /// As bitsandbytes writes them.
    const PUBLISHED: [f64; 16] = [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ];

    #[test]
    fn every_code_is_its_value_and_back() {
        for (code, published) in (0..16).zip(PUBLISHED) {
            assert_eq!(f64::from(to_f32(code)), published, "{code}");
            assert_eq!(from_f32(to_f32(code)), code);
        }
    }

    #[test]
    fn numbers_become_the_nearest_code() {
        for step in -1200..=1200 {
            let value = step as f32 / 1000.;
            let distance = (to_f32(from_f32(value)) - value).abs();
            let least = TABLE.iter().map(|v| (v - value).abs()).fold(2., f32::min);
            assert_eq!(distance, least, "{value}");
        }
    }
}
