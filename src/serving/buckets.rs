//! Sizes of steps. A step takes the slots from the first to the highest that is occupied, so that a sequence in a high
//! slot makes a step large: it moves to a free one where that makes the step smaller.

/// Up to this many slots, each number of them is a size of its own.
const EXACT: usize = 8;

/// Who moves from one slot to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Move {
    pub from: usize,
    pub to: usize,
}

/// The sizes that steps have.
#[derive(Clone, Copy, Debug)]
pub(super) struct Buckets {
    slots: usize,
    /// Whether all steps have one size.
    one: bool,
}

impl Buckets {
    /// For up to `slots` slots; with batch invariance they are the only size.
    pub fn new(slots: usize, batch_invariant: bool) -> Self {
        Self {
            slots,
            one: batch_invariant,
        }
    }

    /// Slots of the step that takes the first `used` ones.
    pub fn size(&self, used: usize) -> usize {
        match used {
            _ if self.one => self.slots,
            ..=EXACT => used,
            _ => used.next_power_of_two().min(self.slots),
        }
    }

    /// Moves those in the highest slots to the lowest free ones, until a step is no larger than their number needs;
    /// who has moved, in order.
    pub fn compact<T>(&self, slots: &mut [Option<T>]) -> Vec<Move> {
        let wanted = self.size(slots.iter().flatten().count());
        let mut moves = Vec::new();
        while let Some(from) = slots.iter().rposition(Option::is_some)
            && self.size(from + 1) > wanted
            && let Some(to) = slots[..from].iter().position(Option::is_none)
        {
            slots.swap(from, to);
            moves.push(Move { from, to });
        }
        moves
    }
}

#[cfg(test)]
mod tests {
    use super::{Buckets, Move};

    /// Slots of which these are occupied, each by its own number.
    fn slots(count: usize, occupied: &[usize]) -> Vec<Option<usize>> {
        let by = |slot: usize| occupied.contains(&slot).then_some(slot);
        (0..count).map(by).collect()
    }

    #[test]
    fn up_to_eight_sizes_are_exact_then_powers_of_two() {
        let buckets = Buckets::new(200, false);
        for (used, expected) in [
            (0, 0),
            (1, 1),
            (7, 7),
            (8, 8),
            (9, 16),
            (16, 16),
            (17, 32),
            (64, 64),
            (65, 128),
            (129, 200),
            (200, 200),
        ] {
            assert_eq!(buckets.size(used), expected, "{used}");
        }
        let one = Buckets::new(200, true);
        assert!((1..=200).all(|used| one.size(used) == 200));
    }

    #[test]
    fn one_that_is_left_in_a_high_slot_moves_down() {
        let mut all = slots(256, &[200]);
        let moves = Buckets::new(256, false).compact(&mut all);
        assert_eq!(moves, [Move { from: 200, to: 0 }]);
        assert_eq!(all[0], Some(200));
        assert_eq!(all.iter().flatten().count(), 1);
    }

    #[test]
    fn nobody_moves_where_the_size_stays() {
        let buckets = Buckets::new(64, false);
        // 9 to 16 slots are one size.
        let nine: Vec<usize> = (7..16).collect();
        let full: Vec<usize> = (0..64).collect();
        for occupied in [&[][..], &[0], &[0, 1, 2], &nine, &full] {
            let mut all = slots(64, occupied);
            assert!(buckets.compact(&mut all).is_empty(), "{occupied:?}");
            assert_eq!(all, slots(64, occupied));
        }
        let mut all = slots(64, &[63]);
        assert!(Buckets::new(64, true).compact(&mut all).is_empty());
    }

    /// The highest goes first, to the lowest slot that is free, and no further than is needed.
    #[test]
    fn only_the_highest_move() {
        let occupied: Vec<usize> = (0..40).step_by(2).collect();
        let mut all = slots(64, &occupied);
        let moves = Buckets::new(64, false).compact(&mut all);
        // 20 need 32 slots: those in 32, 34, 36 and 38 move.
        let expected = [(38, 1), (36, 3), (34, 5), (32, 7)];
        assert_eq!(moves, expected.map(|(from, to)| Move { from, to }));
        assert_eq!(all.iter().rposition(Option::is_some), Some(30));
    }

    /// Whoever is left, the size is that of their number, and all are still there.
    #[test]
    fn the_size_follows_the_number() {
        let buckets = Buckets::new(100, false);
        for spread in 1..=97 {
            let occupied: Vec<usize> = (0..100).filter(|i| i * 31 % 97 < spread).collect();
            let mut all = slots(100, &occupied);
            buckets.compact(&mut all);
            let used = all.iter().rposition(Option::is_some).map_or(0, |i| i + 1);
            assert_eq!(buckets.size(used), buckets.size(occupied.len()));
            let mut there: Vec<usize> = all.into_iter().flatten().collect();
            there.sort_unstable();
            assert_eq!(there, occupied);
        }
    }
}
