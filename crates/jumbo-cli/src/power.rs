//! C's `pow`, so that the command needs no libm.so.6.
//!
//! Progress bars smooth their rate with it, and nothing else here takes a function of that library.
//! The loader would map and relocate it at each start of a program: 0.07 ms.

/// `base` to the power of `exponent`, as pow(3) has it.
#[expect(unsafe_code, reason = "the standard library calls it by its C name")]
#[unsafe(no_mangle)]
extern "C" fn pow(base: f64, exponent: f64) -> f64 {
    libm::pow(base, exponent)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_standard_librarys_power_is_ours() {
        let (base, exponent) = std::hint::black_box((0.1f64, 1.5f64));
        assert!((base.powf(exponent) - 0.031_622_776_601_683_79).abs() < 1e-16);
        assert_eq!(std::hint::black_box(2.0f64).powf(10.0), 1024.0);
    }
}
