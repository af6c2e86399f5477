//! Evaluation of seccomp filters: [`allows`], by an interpreter of classic BPF as in seccomp(2).
//! It also has the steps of which jumbo's own filters are made.
//!
//! A program passes its filter to jumbo before the kernel installs it. So jumbo finds out which of
//! its system calls the filter allows without making one. [`crate::sandbox`] uses it. Pure: no
//! system call, no memory of its own.

type Instruction = libc::sock_filter;
pub(crate) use libc::sock_filter as Step;

/// Maximum length of a filter: BPF_MAXINSNS.
const MAX_INSTRUCTIONS: usize = 4096;
/// Words of scratch memory: BPF_MEMWORDS.
const SCRATCH_WORDS: usize = 16;

/// Input of a filter: one system call (`struct seccomp_data`).
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Call {
    number: i32,
    architecture: u32,
    instruction: u64,
    arguments: [u64; 6],
}

#[cfg(target_arch = "x86_64")]
pub(crate) const ARCHITECTURE: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
pub(crate) const ARCHITECTURE: u32 = 0xc000_00b7;

impl Call {
    /// Creates a native call by code at address `instruction`.
    pub fn new(number: libc::c_long, instruction: usize, arguments: [usize; 6]) -> Self {
        Self {
            number: i32::try_from(number).unwrap_or(-1),
            architecture: ARCHITECTURE,
            instruction: instruction as u64,
            arguments: arguments.map(|argument| argument as u64),
        }
    }

    /// Returns the word at an offset of `struct seccomp_data`.
    fn word(&self, offset: u32) -> Option<u32> {
        let half = |whole: u64| {
            let bytes = whole.to_ne_bytes();
            let at = offset as usize % 8;
            let bytes = bytes.get(at..at + 4)?;
            Some(u32::from_ne_bytes(bytes.try_into().ok()?))
        };
        match offset {
            _ if !offset.is_multiple_of(4) => None,
            0 => Some(self.number.cast_unsigned()),
            4 => Some(self.architecture),
            8 | 12 => half(self.instruction),
            16.. => half(*self.arguments.get((offset as usize - 16) / 8)?),
            _ => None,
        }
    }
}

pub(crate) const KILL: u32 = libc::SECCOMP_RET_KILL_PROCESS;
pub(crate) const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;

// Offsets in `struct seccomp_data`: the number, the architecture, the halves of each argument.
pub(crate) const AT_NUMBER: u32 = 0;
pub(crate) const AT_ARCHITECTURE: u32 = 4;
pub(crate) const fn low(argument: u32) -> u32 {
    16 + 8 * argument
}
pub(crate) const fn high(argument: u32) -> u32 {
    low(argument) + 4
}

pub(crate) const fn load(offset: u32) -> Step {
    step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset, 0, 0)
}
pub(crate) const fn answer(action: u32) -> Step {
    step(libc::BPF_RET | libc::BPF_K, action, 0, 0)
}
/// Skips `then` steps if the loaded word is `value`, else `other` steps.
pub(crate) const fn equal(value: u32, then: u8, other: u8) -> Step {
    test(libc::BPF_JEQ, value, then, other)
}
/// Variant of [`equal`] for a word above `value`.
pub(crate) const fn greater(value: u32, then: u8, other: u8) -> Step {
    test(libc::BPF_JGT, value, then, other)
}
/// Variant of [`equal`] for a word that has one of these bits.
pub(crate) const fn has(bits: u32, then: u8, other: u8) -> Step {
    test(libc::BPF_JSET, bits, then, other)
}
const fn test(kind: u32, k: u32, then: u8, other: u8) -> Step {
    step(libc::BPF_JMP | kind | libc::BPF_K, k, then, other)
}
#[expect(clippy::cast_possible_truncation, reason = "codes have 8 bits")]
const fn step(code: u32, k: u32, jt: u8, jf: u8) -> Step {
    Step {
        code: code as u16,
        jt,
        jf,
        k,
    }
}
/// Skips `otherwise` steps unless the loaded word is the number of this call.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "numbers of system calls are small"
)]
pub(crate) const fn call(number: libc::c_long, otherwise: u8) -> Step {
    equal(number as u32, 0, otherwise)
}
pub(crate) const fn number(value: i32) -> u32 {
    value.cast_unsigned()
}

/// Reports whether a call is harmless under a filter: it passes, fails with an errno, or is logged.
pub fn allows(filter: &[Instruction], call: &Call) -> bool {
    passes(filter, call) || action(filter, call) == Some(libc::SECCOMP_RET_ERRNO)
}

/// Reports whether a call passes a filter, or is logged.
pub fn passes(filter: &[Instruction], call: &Call) -> bool {
    let passing = [libc::SECCOMP_RET_ALLOW, libc::SECCOMP_RET_LOG];
    action(filter, call).is_some_and(|action| passing.contains(&action))
}

fn action(filter: &[Instruction], call: &Call) -> Option<u32> {
    Some(evaluate(filter, call)? & libc::SECCOMP_RET_ACTION_FULL)
}

/// Returns a filter's action for a call; `None` if the kernel would reject the filter.
fn evaluate(filter: &[Instruction], call: &Call) -> Option<u32> {
    /// `sizeof(struct seccomp_data)`.
    const SIZE: u32 = 64;
    const _: () = assert!(size_of::<Call>() == SIZE as usize);
    let (mut a, mut x, mut scratch) = (0u32, 0u32, [0u32; SCRATCH_WORDS]);
    let mut at = 0usize;
    // All jumps are forward.
    for _ in 0..MAX_INSTRUCTIONS {
        let instruction = filter.get(at)?;
        at += 1;
        let (code, k) = (u32::from(instruction.code), instruction.k);
        let operand = if code & libc::BPF_X == 0 { k } else { x };
        match code & 7 {
            libc::BPF_RET => return Some(if code & 0x18 == libc::BPF_A { a } else { k }),
            libc::BPF_ST => *scratch.get_mut(k as usize)? = a,
            libc::BPF_STX => *scratch.get_mut(k as usize)? = x,
            libc::BPF_LD | libc::BPF_LDX => {
                let value = match code & 0xe0 {
                    libc::BPF_IMM => k,
                    libc::BPF_LEN => SIZE,
                    libc::BPF_MEM => *scratch.get(k as usize)?,
                    libc::BPF_ABS if code & 7 == libc::BPF_LD => call.word(k)?,
                    _ => return None,
                };
                if code & 7 == libc::BPF_LD {
                    a = value;
                } else {
                    x = value;
                }
            }
            libc::BPF_ALU => {
                a = match code & 0xf0 {
                    libc::BPF_ADD => a.wrapping_add(operand),
                    libc::BPF_SUB => a.wrapping_sub(operand),
                    libc::BPF_MUL => a.wrapping_mul(operand),
                    // The kernel returns 0 for a division by zero: it kills the thread.
                    libc::BPF_DIV => a.checked_div(operand)?,
                    libc::BPF_OR => a | operand,
                    libc::BPF_AND => a & operand,
                    libc::BPF_XOR => a ^ operand,
                    libc::BPF_LSH => a.wrapping_shl(operand),
                    libc::BPF_RSH => a.wrapping_shr(operand),
                    libc::BPF_NEG => a.wrapping_neg(),
                    _ => return None,
                }
            }
            libc::BPF_JMP => {
                let is_met = match code & 0xf0 {
                    libc::BPF_JA => {
                        at = at.checked_add(k as usize)?;
                        continue;
                    }
                    libc::BPF_JEQ => a == operand,
                    libc::BPF_JGT => a > operand,
                    libc::BPF_JGE => a >= operand,
                    libc::BPF_JSET => a & operand != 0,
                    _ => return None,
                };
                at += usize::from(if is_met {
                    instruction.jt
                } else {
                    instruction.jf
                });
            }
            // BPF_MISC: TAX is 0, TXA is not.
            _ if code & 0x80 == 0 => x = a,
            _ => a = x,
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOAD: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    const RETURN: u32 = libc::BPF_RET | libc::BPF_K;
    const EQUAL: u32 = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;

    fn madvise(advice: i32) -> Call {
        let advice = usize::try_from(advice).unwrap();
        Call::new(libc::SYS_madvise, 1, [5 << 32 | 7, 2, advice, 0, 0, 0])
    }

    #[test]
    fn an_allow_list_allows_its_calls() {
        let filter = |number: i64, otherwise| {
            [
                step(LOAD, 0, 0, 0),
                step(EQUAL, u32::try_from(number).unwrap(), 0, 1),
                step(RETURN, libc::SECCOMP_RET_ALLOW, 0, 0),
                step(RETURN, otherwise, 0, 0),
            ]
        };
        let kill = libc::SECCOMP_RET_KILL_PROCESS;
        assert!(allows(&filter(libc::SYS_madvise, kill), &madvise(14)));
        assert!(!allows(&filter(libc::SYS_brk, kill), &madvise(14)));
        for (action, passes) in [
            (libc::SECCOMP_RET_ERRNO | 1, true),
            (libc::SECCOMP_RET_LOG, true),
            (libc::SECCOMP_RET_TRAP, false),
            (libc::SECCOMP_RET_TRACE, false),
            (libc::SECCOMP_RET_USER_NOTIF, false),
        ] {
            let filter = filter(libc::SYS_brk, action);
            assert_eq!(allows(&filter, &madvise(14)), passes, "{action:x}");
        }
    }

    #[test]
    fn arguments_and_arithmetic_match_the_kernel() {
        // The advice times three, through X and the scratch memory; then the high half of the first
        // argument.
        let filter = [
            step(LOAD, 32, 0, 0),
            step(libc::BPF_MISC | libc::BPF_TAX, 0, 0, 0),
            step(libc::BPF_ST, 3, 0, 0),
            step(libc::BPF_ALU | libc::BPF_ADD | libc::BPF_X, 0, 0, 0),
            step(libc::BPF_LDX | libc::BPF_MEM, 3, 0, 0),
            step(libc::BPF_ALU | libc::BPF_ADD | libc::BPF_X, 0, 0, 0),
            step(EQUAL, 42, 1, 0),
            step(RETURN, 1, 0, 0),
            step(LOAD, 20, 0, 0),
            step(libc::BPF_RET | libc::BPF_A, 0, 0, 0),
        ];
        assert_eq!(evaluate(&filter, &madvise(14)), Some(5));
        assert_eq!(evaluate(&filter, &madvise(4)), Some(1));
    }

    #[test]
    fn an_invalid_filter_allows_nothing() {
        let none: [&[Instruction]; 4] = [
            &[],
            &[step(LOAD, 64, 0, 0)],
            &[step(libc::BPF_JMP | libc::BPF_JA, u32::MAX, 0, 0)],
            &[step(LOAD, 0, 0, 0)],
        ];
        for filter in none {
            assert!(!allows(filter, &madvise(14)));
        }
    }
}
