//! What a seccomp filter would answer: [`answer`], an interpreter of classic BPF as seccomp(2) takes it.
//!
//! A program hands its filter over before the kernel has it. So which of our calls it lets pass can be found out
//! without making one. [`crate::sandbox`] asks it. Pure: no call, no memory but the caller's.

type Step = libc::sock_filter;

/// The longest program (BPF_MAXINSNS), and the cells of its scratch memory (BPF_MEMWORDS).
const LONGEST: usize = 4096;
const CELLS: usize = 16;

/// Of one system call: what a filter looks at.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Call {
    number: i32,
    architecture: u32,
    instruction: u64,
    arguments: [u64; 6],
}

#[cfg(target_arch = "x86_64")]
const ARCHITECTURE: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const ARCHITECTURE: u32 = 0xc000_00b7;

impl Call {
    /// A call of this machine's, made by code at `instruction`.
    pub fn new(number: libc::c_long, instruction: usize, arguments: [usize; 6]) -> Self {
        Self {
            number: i32::try_from(number).unwrap_or(-1),
            architecture: ARCHITECTURE,
            instruction: instruction as u64,
            arguments: arguments.map(|argument| argument as u64),
        }
    }

    /// The word at an offset of `struct seccomp_data`.
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

/// Whether a filter lets a call be made: it passes, or fails with an errno, and at most a log hears of it.
pub fn lets(filter: &[Step], call: &Call) -> bool {
    let harmless = [
        libc::SECCOMP_RET_ALLOW,
        libc::SECCOMP_RET_LOG,
        libc::SECCOMP_RET_ERRNO,
    ];
    answer(filter, call)
        .is_some_and(|answer| harmless.contains(&(answer & libc::SECCOMP_RET_ACTION_FULL)))
}

/// What a filter answers to a call; `None` where it is none that the kernel would take.
pub fn answer(filter: &[Step], call: &Call) -> Option<u32> {
    /// `sizeof(struct seccomp_data)`.
    const SIZE: u32 = 64;
    const _: () = assert!(size_of::<Call>() == SIZE as usize);
    let (mut a, mut x, mut cells) = (0u32, 0u32, [0u32; CELLS]);
    let mut at = 0usize;
    // It only ever jumps forward.
    for _ in 0..LONGEST {
        let step = filter.get(at)?;
        at += 1;
        let (code, k) = (u32::from(step.code), step.k);
        let operand = if code & libc::BPF_X == 0 { k } else { x };
        match code & 7 {
            libc::BPF_RET => return Some(if code & 0x18 == libc::BPF_A { a } else { k }),
            libc::BPF_ST => *cells.get_mut(k as usize)? = a,
            libc::BPF_STX => *cells.get_mut(k as usize)? = x,
            libc::BPF_LD | libc::BPF_LDX => {
                let value = match code & 0xe0 {
                    libc::BPF_IMM => k,
                    libc::BPF_LEN => SIZE,
                    libc::BPF_MEM => *cells.get(k as usize)?,
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
                    // By zero the kernel answers 0, which is to kill the thread.
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
                at += usize::from(if is_met { step.jt } else { step.jf });
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

    const fn step(code: u32, k: u32, jt: u8, jf: u8) -> Step {
        #[expect(clippy::cast_possible_truncation, reason = "codes have 16 bits")]
        let code = code as u16;
        Step { code, jt, jf, k }
    }

    const LOAD: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    const RETURN: u32 = libc::BPF_RET | libc::BPF_K;
    const EQUAL: u32 = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;

    fn madvise(advice: i32) -> Call {
        let advice = usize::try_from(advice).unwrap();
        Call::new(libc::SYS_madvise, 1, [5 << 32 | 7, 2, advice, 0, 0, 0])
    }

    #[test]
    fn an_allow_list_lets_what_it_names() {
        let filter = |number: i64, otherwise| {
            [
                step(LOAD, 0, 0, 0),
                step(EQUAL, u32::try_from(number).unwrap(), 0, 1),
                step(RETURN, libc::SECCOMP_RET_ALLOW, 0, 0),
                step(RETURN, otherwise, 0, 0),
            ]
        };
        let kill = libc::SECCOMP_RET_KILL_PROCESS;
        assert!(lets(&filter(libc::SYS_madvise, kill), &madvise(14)));
        assert!(!lets(&filter(libc::SYS_brk, kill), &madvise(14)));
        for (answer, passes) in [
            (libc::SECCOMP_RET_ERRNO | 1, true),
            (libc::SECCOMP_RET_LOG, true),
            (libc::SECCOMP_RET_TRAP, false),
            (libc::SECCOMP_RET_TRACE, false),
            (libc::SECCOMP_RET_USER_NOTIF, false),
        ] {
            let filter = filter(libc::SYS_brk, answer);
            assert_eq!(lets(&filter, &madvise(14)), passes, "{answer:x}");
        }
    }

    #[test]
    fn arguments_and_arithmetic_are_the_kernels() {
        // The advice, times three, by way of X and of the memory; then the high half of the first argument.
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
        assert_eq!(answer(&filter, &madvise(14)), Some(5));
        assert_eq!(answer(&filter, &madvise(4)), Some(1));
    }

    #[test]
    fn what_is_no_filter_lets_nothing() {
        let none: [&[Step]; 4] = [
            &[],
            &[step(LOAD, 64, 0, 0)],
            &[step(libc::BPF_JMP | libc::BPF_JA, u32::MAX, 0, 0)],
            &[step(LOAD, 0, 0, 0)],
        ];
        for filter in none {
            assert!(!lets(filter, &madvise(14)));
        }
    }
}
