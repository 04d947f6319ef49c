//! Tiles in software, for tests on CPUs without AMX: what the instructions do, by their description in Intel's Software
//! Developer's Manual, volume 2.
//!
//! A misuse that the hardware answers with an invalid opcode is a panic.

use super::{Config, ROWS};
use std::cell::RefCell;
use std::ptr;

/// A row.
type Words = [[u8; 4]; 16];

/// The registers of a thread.
struct Registers {
    config: Config,
    tiles: [[Words; ROWS]; 8],
}

thread_local! {
    static REGISTERS: RefCell<Registers> =
        const { RefCell::new(Registers { config: Config::NONE, tiles: [[[[0; 4]; 16]; ROWS]; 8] }) };
}

/// Whether tests have this in place of the instructions.
pub(super) fn is_used() -> bool {
    !super::detected()
}

impl Registers {
    /// Rows of a tile, and bytes of each.
    fn shape(&self, tile: u8) -> (usize, usize) {
        let tile = usize::from(tile);
        let (rows, bytes) = (self.config.rows[tile].into(), self.config.bytes_per_row[tile].into());
        assert!(self.config.palette == 1 && rows > 0 && bytes > 0, "tile {tile} is not configured");
        assert!(tile < 8 && rows <= ROWS && bytes <= 64, "tile {tile}: {rows} rows of {bytes} bytes");
        (rows, bytes)
    }

    /// For each row of sums: adds to all words of it what `add` makes of a word of the left tile and those of the right one.
    fn multiply(&mut self, [sums, left, right]: [u8; 3], add: impl Fn(&mut Words, [u8; 4], &Words)) {
        assert!(sums != left && left != right && sums != right, "tiles are not three");
        let ((rows, bytes), (left_rows, depth), (words, right_bytes)) =
            (self.shape(sums), self.shape(left), self.shape(right));
        let fits = left_rows == rows && right_bytes == bytes && 4 * words == depth;
        assert!(fits, "[{left_rows}, {depth}] times [{words}, {right_bytes}] is no [{rows}, {bytes}]");
        let [left, right] = [left, right].map(|tile| self.tiles[usize::from(tile)]);
        for (sums, left) in self.tiles[usize::from(sums)].iter_mut().zip(&left).take(rows) {
            for (left, right) in left.iter().zip(&right).take(words) {
                add(sums, *left, right);
            }
            // Words that are none are zero.
            sums[bytes / 4..].fill([0; 4]);
        }
    }
}

fn with<T>(f: impl FnOnce(&mut Registers) -> T) -> T {
    REGISTERS.with_borrow_mut(f)
}

/// The configuration so far; `config` is that of from here on, with which all tiles are zero.
pub(super) fn configure(config: Config) -> Config {
    with(|registers| {
        registers.tiles = [[[[0; 4]; 16]; ROWS]; 8];
        std::mem::replace(&mut registers.config, config)
    })
}

pub(super) fn zero(tile: u8) {
    with(|registers| {
        registers.shape(tile);
        registers.tiles[usize::from(tile)] = [[[0; 4]; 16]; ROWS];
    });
}

/// # Safety
/// As for the instruction.
pub(super) unsafe fn load(tile: u8, from: *const u8, stride: usize) {
    with(|registers| {
        let (rows, bytes) = registers.shape(tile);
        let tile = &mut registers.tiles[usize::from(tile)];
        *tile = [[[0; 4]; 16]; ROWS];
        for (row, to) in tile.iter_mut().take(rows).enumerate() {
            // SAFETY: memory of all rows, as the caller vouches; a row of the register is as long.
            unsafe { ptr::copy_nonoverlapping(from.add(row * stride), to.as_mut_ptr().cast(), bytes) };
        }
    });
}

/// # Safety
/// As for the instruction.
pub(super) unsafe fn store(tile: u8, to: *mut u8, stride: usize) {
    with(|registers| {
        let (rows, bytes) = registers.shape(tile);
        for (row, from) in registers.tiles[usize::from(tile)].iter().take(rows).enumerate() {
            // SAFETY: as in `load`.
            unsafe { ptr::copy_nonoverlapping(from.as_ptr().cast(), to.add(row * stride), bytes) };
        }
    });
}

pub(super) fn multiply_int8(tiles: [u8; 3]) {
    with(|registers| {
        registers.multiply(tiles, |sums, left, right| {
            for (sum, right) in sums.iter_mut().zip(right) {
                let products = left.iter().zip(right).map(|(a, b)| i32::from(*a as i8) * i32::from(*b as i8));
                *sum = i32::from_ne_bytes(*sum).wrapping_add(products.sum()).to_ne_bytes();
            }
        });
    });
}

/// The hardware adds up products of even and of odd numbers apart, before it adds either to the sums: here they meet one after
/// the other, which rounds no worse. Subnormal numbers are zero in both.
pub(super) fn multiply_bf16(tiles: [u8; 3]) {
    fn flushed(x: f32) -> f32 {
        match x.abs() < f32::MIN_POSITIVE {
            true => 0.,
            false => x,
        }
    }
    let numbers =
        |[a, b, c, d]: [u8; 4]| [[0, 0, a, b], [0, 0, c, d]].map(|bytes| flushed(f32::from_ne_bytes(bytes)));
    with(|registers| {
        registers.multiply(tiles, |sums, left, right| {
            let left = numbers(left);
            for (sum, right) in sums.iter_mut().zip(right) {
                let right = numbers(*right);
                let product = flushed(flushed(left[0] * right[0]) + left[1] * right[1]);
                *sum = flushed(f32::from_ne_bytes(*sum) + product).to_ne_bytes();
            }
        });
    });
}

#[test]
fn sums_are_those_of_the_description() {
    let config = |depth: usize| {
        let mut config = Config { palette: 1, ..Config::NONE };
        config.rows[..8].fill(16);
        config.bytes_per_row[..8].fill(64);
        config.bytes_per_row[1] = depth as u16;
        config.rows[2] = (depth / 4) as u8;
        config
    };
    for depth in [16, 64] {
        let before = configure(config(depth));
        let left: Vec<u8> = (0..1024).map(|i| (i * 37 + 11) as u8).collect();
        let right: Vec<u8> = (0..1024).map(|i| (i * 101 + 3) as u8).collect();
        let mut sums = [7i32; 256];
        // SAFETY: sixteen rows of 64 bytes each.
        unsafe {
            load(0, sums.as_ptr().cast(), 64);
            load(1, left.as_ptr(), 64);
            load(2, right.as_ptr(), 64);
            multiply_int8([0, 1, 2]);
            store(0, sums.as_mut_ptr().cast(), 64);
        }
        for (index, sum) in sums.into_iter().enumerate() {
            let (row, column) = (index / 16, index % 16);
            let product = |k: usize| {
                let (a, b) = (left[64 * row + k], right[64 * (k / 4) + 4 * column + k % 4]);
                i32::from(a as i8) * i32::from(b as i8)
            };
            assert_eq!(sum, 7 + (0..depth).map(product).sum::<i32>());
        }
        configure(before);
    }
}
