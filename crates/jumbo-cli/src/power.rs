//! C function `pow`, so that the command needs no libm.so.6.
//!
//! Progress bars use it, and the command needs no other function of that library. Loading libm
//! takes 0.07 ms at each start.

/// pow(3): `base` to the power of `exponent`.
#[expect(unsafe_code, reason = "the standard library calls it by its C name")]
#[unsafe(no_mangle)]
extern "C" fn pow(base: f64, exponent: f64) -> f64 {
    libm::pow(base, exponent)
}

#[cfg(test)]
mod tests {
    #[test]
    fn powf_calls_this_function() {
        let (base, exponent) = std::hint::black_box((0.1f64, 1.5f64));
        assert!((base.powf(exponent) - 0.031_622_776_601_683_79).abs() < 1e-16);
        assert_eq!(std::hint::black_box(2.0f64).powf(10.0), 1024.0);
    }
}
