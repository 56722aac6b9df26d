//! Philox 4x32-10, a counter-based generator (Salmon et al. 2011).

/// The first of the four words for a counter and a key.
pub(super) fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> u32 {
    for _ in 0..10 {
        let first = 0xD251_1F53 * u64::from(counter[0]);
        let second = 0xCD9E_8D57 * u64::from(counter[2]);
        counter = [
            (second >> 32) as u32 ^ counter[1] ^ key[0],
            second as u32,
            (first >> 32) as u32 ^ counter[3] ^ key[1],
            first as u32,
        ];
        key = [
            key[0].wrapping_add(0x9E37_79B9),
            key[1].wrapping_add(0xBB67_AE85),
        ];
    }
    counter[0]
}

#[cfg(test)]
mod tests {
    use super::philox;

    /// The known answers of the authors' library (Random123, `kat_vectors`).
    #[test]
    fn known_answers() {
        assert_eq!(philox([0; 4], [0; 2]), 0x6627_e8d5);
        assert_eq!(philox([u32::MAX; 4], [u32::MAX; 2]), 0x408f_276d);
        let pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        assert_eq!(philox(pi, [0xa409_3822, 0x299f_31d0]), 0xd16c_fe09);
    }
}
