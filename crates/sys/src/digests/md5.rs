//! MD5 of one stream.

use super::BLOCK_BYTES;

/// RFC 1321: the integer part of 2^32 times abs(sin(i + 1)).
pub(super) const K: [u32; 64] = [
    0xd76aa478, 0xe8c7b756, 0x242070db, 0xc1bdceee, 0xf57c0faf, 0x4787c62a, 0xa8304613, 0xfd469501,
    0x698098d8, 0x8b44f7af, 0xffff5bb1, 0x895cd7be, 0x6b901122, 0xfd987193, 0xa679438e, 0x49b40821,
    0xf61e2562, 0xc040b340, 0x265e5a51, 0xe9b6c7aa, 0xd62f105d, 0x02441453, 0xd8a1e681, 0xe7d3fbc8,
    0x21e1cde6, 0xc33707d6, 0xf4d50d87, 0x455a14ed, 0xa9e3e905, 0xfcefa3f8, 0x676f02d9, 0x8d2a4c8a,
    0xfffa3942, 0x8771f681, 0x6d9d6122, 0xfde5380c, 0xa4beea44, 0x4bdecfa9, 0xf6bb4b60, 0xbebfbc70,
    0x289b7ec6, 0xeaa127fa, 0xd4ef3085, 0x04881d05, 0xd9d4d039, 0xe6db99e5, 0x1fa27cf8, 0xc4ac5665,
    0xf4292244, 0x432aff97, 0xab9423a7, 0xfc93a039, 0x655b59c3, 0x8f0ccc92, 0xffeff47d, 0x85845dd1,
    0x6fa87e4f, 0xfe2ce6e0, 0xa3014314, 0x4e0811a1, 0xf7537e82, 0xbd3af235, 0x2ad7d2bb, 0xeb86d391,
];

/// Four steps: `$f` of the three other words, words of the block, and rotations. `$step` is a function of the way.
macro_rules! md5_rounds {
    ($four:ident) => {
        $four!(f 0; 0 1 2 3; 7 12 17 22);
        $four!(f 4; 4 5 6 7; 7 12 17 22);
        $four!(f 8; 8 9 10 11; 7 12 17 22);
        $four!(f 12; 12 13 14 15; 7 12 17 22);
        $four!(g 16; 1 6 11 0; 5 9 14 20);
        $four!(g 20; 5 10 15 4; 5 9 14 20);
        $four!(g 24; 9 14 3 8; 5 9 14 20);
        $four!(g 28; 13 2 7 12; 5 9 14 20);
        $four!(h 32; 5 8 11 14; 4 11 16 23);
        $four!(h 36; 1 4 7 10; 4 11 16 23);
        $four!(h 40; 13 0 3 6; 4 11 16 23);
        $four!(h 44; 9 12 15 2; 4 11 16 23);
        $four!(i 48; 0 7 14 5; 6 10 15 21);
        $four!(i 52; 12 3 10 1; 6 10 15 21);
        $four!(i 56; 8 15 6 13; 6 10 15 21);
        $four!(i 60; 4 11 2 9; 6 10 15 21);
    };
}
#[cfg(target_arch = "x86_64")]
pub(super) use md5_rounds;

pub(super) fn scalar(state: &mut [u32; 4], blocks: &[u8]) {
    // Functions, because names of variables in `md5_rounds` are its own.
    fn f(b: u32, c: u32, d: u32) -> u32 {
        d ^ (b & (c ^ d))
    }
    fn h(b: u32, c: u32, d: u32) -> u32 {
        b ^ c ^ d
    }
    fn i(b: u32, c: u32, d: u32) -> u32 {
        c ^ (b | !d)
    }
    /// A sum that does not wait for the step before. The compiler must not add its parts later: that makes the chain of dependent steps longer
    /// (measured: 0.75 instead of 0.91 GB/s).
    #[inline(always)]
    fn early(sum: u32) -> u32 {
        #[cfg(target_arch = "x86_64")]
        let sum = {
            let mut sum = sum;
            // SAFETY: it has no instruction; it names a register that it does not change.
            unsafe {
                core::arch::asm!("/* {0:e} */", inout(reg) sum, options(pure, nomem, nostack, preserves_flags));
            }
            sum
        };
        sum
    }
    let [mut a, mut b, mut c, mut d] = *state;
    for block in blocks.chunks_exact(BLOCK_BYTES) {
        let word = |at: usize| {
            u32::from_le_bytes(block[4 * at..4 * at + 4].try_into().expect("four bytes"))
        };
        let before = [a, b, c, d];
        macro_rules! step {
            // The halves of `g` have no bit in common: the late word is added last.
            (g $a:ident $b:ident $c:ident $d:ident $k:expr, $m:literal, $s:literal) => {
                $a = early($a.wrapping_add(word($m)).wrapping_add(K[$k]).wrapping_add($c & !$d));
                $a = $a.wrapping_add($b & $d).rotate_left($s).wrapping_add($b);
            };
            ($f:ident $a:ident $b:ident $c:ident $d:ident $k:expr, $m:literal, $s:literal) => {
                $a = early($a.wrapping_add(word($m)).wrapping_add(K[$k]));
                $a = $a.wrapping_add($f($b, $c, $d));
                $a = $a.rotate_left($s).wrapping_add($b);
            };
        }
        macro_rules! four {
            ($f:ident $k:literal; $m0:literal $m1:literal $m2:literal $m3:literal; $s0:literal $s1:literal $s2:literal $s3:literal) => {
                step!($f a b c d $k, $m0, $s0);
                step!($f d a b c $k + 1, $m1, $s1);
                step!($f c d a b $k + 2, $m2, $s2);
                step!($f b c d a $k + 3, $m3, $s3);
            };
        }
        md5_rounds!(four);
        a = a.wrapping_add(before[0]);
        b = b.wrapping_add(before[1]);
        c = c.wrapping_add(before[2]);
        d = d.wrapping_add(before[3]);
    }
    *state = [a, b, c, d];
}
