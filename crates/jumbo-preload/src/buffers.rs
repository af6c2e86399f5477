//! Calls that read or write memory of the program's: read(2) and its kin; and those that lose something where they cannot write, a
//! connection or the end of a child: accept(2), wait(2).
//!
//! A system call into shared memory that comes in by blocks ([`jumbo_inside::shmem::user`]) and was never touched would fail
//! with EFAULT: so it is brought in before. Where there is no such memory a call costs a comparison and a jump.
//!
//! All of them are points at which a thread can be cancelled, which unwinds its stack, and Rust's frames take no part in
//! that. So ours are not there any more when the call is made: each function is a few instructions that jump on to
//! the next definition, with registers and stack as they were. What is on the stack before that is told to debuggers, profilers and
//! handlers of signals that unwind it (.eh_frame).

use core::arch::naked_asm;
use core::ffi::{c_int, c_long};

use jumbo_inside::shmem::user::touch;
use jumbo_inside::sys::copy_words;

use crate::next;

/// Defines functions: the name, the number of the system call that is the same, and what looks at their arguments, six at
/// the most.
macro_rules! buffers {
    ($($name:ident $($number:ident)?: $look:ident;)*) => {
        /// The numbers of these calls.
        pub(crate) const NUMBERS: &[c_long] = &[$($(libc::$number,)?)*];

        /// Brings in what the system call of that number reads or writes.
        pub(crate) extern "C" fn touch_for(
            number: c_long,
            first: usize,
            second: usize,
            third: usize,
            fourth: usize,
            fifth: usize,
            sixth: usize,
        ) {
            match number {
                $($(libc::$number => $look(first, second, third, fourth, fifth, sixth),)?)*
                _ => {}
            }
        }

        $(
        #[doc = concat!("The C library's ", stringify!($name), ".")]
        ///
        /// # Safety
        /// As for the C library's.
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name() {
            #[cfg(target_arch = "x86_64")]
            naked_asm!(
                ".cfi_startproc",
                "endbr64",
                "mov rax, [rip + {ranges}]",
                "cmp qword ptr [rax], 0",
                "je 2f",
                "push rdi", ".cfi_adjust_cfa_offset 8",
                "push rsi", ".cfi_adjust_cfa_offset 8",
                "push rdx", ".cfi_adjust_cfa_offset 8",
                "push rcx", ".cfi_adjust_cfa_offset 8",
                "push r8", ".cfi_adjust_cfa_offset 8",
                "push r9", ".cfi_adjust_cfa_offset 8",
                "sub rsp, 8", ".cfi_adjust_cfa_offset 8",
                "call {look}",
                "add rsp, 8", ".cfi_adjust_cfa_offset -8",
                "pop r9", ".cfi_adjust_cfa_offset -8",
                "pop r8", ".cfi_adjust_cfa_offset -8",
                "pop rcx", ".cfi_adjust_cfa_offset -8",
                "pop rdx", ".cfi_adjust_cfa_offset -8",
                "pop rsi", ".cfi_adjust_cfa_offset -8",
                "pop rdi", ".cfi_adjust_cfa_offset -8",
                "2:",
                "jmp [rip + {next}]",
                ".cfi_endproc",
                ranges = sym RANGES,
                look = sym $look,
                next = sym next::$name,
            );
            #[cfg(target_arch = "aarch64")]
            naked_asm!(
                ".cfi_startproc",
                "hint #34",
                "adrp x16, {ranges}",
                "ldr x16, [x16, :lo12:{ranges}]",
                "ldr x16, [x16]",
                "cbz x16, 2f",
                "stp x0, x1, [sp, #-64]!", ".cfi_adjust_cfa_offset 64",
                "stp x2, x3, [sp, #16]", "stp x4, x5, [sp, #32]",
                "str x30, [sp, #48]", ".cfi_rel_offset x30, 48",
                "bl {look}",
                "ldr x30, [sp, #48]", ".cfi_restore x30",
                "ldp x4, x5, [sp, #32]", "ldp x2, x3, [sp, #16]",
                "ldp x0, x1, [sp], #64", ".cfi_adjust_cfa_offset -64",
                "2:",
                "adrp x16, {next}",
                "ldr x16, [x16, :lo12:{next}]",
                "br x16",
                ".cfi_endproc",
                ranges = sym RANGES,
                look = sym $look,
                next = sym next::$name,
            );
        }
        )*
    };
}

/// Where the number of ranges stands, for the machine code above.
pub(crate) static RANGES: &core::sync::atomic::AtomicUsize = jumbo_inside::shmem::user::RANGES;

buffers! {
    read SYS_read: one;
    write SYS_write: one;
    pread SYS_pread64: one;
    pread64: one;
    pwrite SYS_pwrite64: one;
    pwrite64: one;
    recv: one;
    send: one;
    recvfrom SYS_recvfrom: from;
    sendto SYS_sendto: to;
    accept SYS_accept: accepted;
    accept4 SYS_accept4: accepted;
    wait: first;
    waitpid: second;
    wait3: usage;
    wait4 SYS_wait4: usage_of;
    waitid SYS_waitid: id;
    readv SYS_readv: several;
    writev SYS_writev: several;
    preadv SYS_preadv: several;
    preadv64: several;
    preadv2 SYS_preadv2: several;
    preadv64v2: several;
    pwritev SYS_pwritev: several;
    pwritev64: several;
    pwritev2 SYS_pwritev2: several;
    pwritev64v2: several;
    recvmsg SYS_recvmsg: message;
    sendmsg SYS_sendmsg: message;
    recvmmsg SYS_recvmmsg: messages;
    sendmmsg SYS_sendmmsg: messages;
    fread: elements;
    fread_unlocked: elements;
    fwrite: elements;
    fwrite_unlocked: elements;
}

/// The lower half of a register: an `int`, whose upper half the calling conventions leave open.
const fn low(word: usize) -> usize {
    word & u32::MAX as usize
}

/// A name of a socket, and its length, which the kernel writes.
fn touch_name(name: usize, length: usize) {
    // The kernel writes no longer name.
    touch(name, size_of::<libc::sockaddr_storage>());
    touch(length, size_of::<libc::socklen_t>());
}

fn touch_status(status: usize) {
    touch(status, size_of::<c_int>());
}

// Each is given six registers, of which the call may have set fewer.

/// A descriptor, an address, a length.
extern "C" fn one(_: usize, address: usize, length: usize, _: usize, _: usize, _: usize) {
    touch(address, length);
}

/// The same, flags, the address of a name, the address of its length.
extern "C" fn from(_: usize, address: usize, length: usize, _: usize, name: usize, size: usize) {
    touch(address, length);
    touch_name(name, size);
}

/// The same, flags, the address of a name, its length.
extern "C" fn to(_: usize, address: usize, length: usize, _: usize, name: usize, size: usize) {
    touch(address, length);
    touch(name, low(size));
}

/// A descriptor, the address of a name, the address of its length.
extern "C" fn accepted(_: usize, name: usize, length: usize, _: usize, _: usize, _: usize) {
    touch_name(name, length);
}

/// The address of a status.
extern "C" fn first(status: usize, _: usize, _: usize, _: usize, _: usize, _: usize) {
    touch_status(status);
}

/// A process, the address of a status.
extern "C" fn second(_: usize, status: usize, _: usize, _: usize, _: usize, _: usize) {
    touch_status(status);
}

/// The address of a status, options, the address of a `struct rusage`.
extern "C" fn usage(status: usize, _: usize, used: usize, _: usize, _: usize, _: usize) {
    touch_status(status);
    touch(used, size_of::<libc::rusage>());
}

/// A process, and the same.
extern "C" fn usage_of(_: usize, status: usize, _: usize, used: usize, _: usize, _: usize) {
    touch_status(status);
    touch(used, size_of::<libc::rusage>());
}

/// What is waited for, its number, the address of a `siginfo_t`.
extern "C" fn id(_: usize, _: usize, information: usize, _: usize, _: usize, _: usize) {
    touch(information, size_of::<libc::siginfo_t>());
}

/// An address, the size of an element, how many.
extern "C" fn elements(address: usize, size: usize, count: usize, _: usize, _: usize, _: usize) {
    touch(address, size.saturating_mul(count));
}

/// A descriptor, the address of an array of `struct iovec`, its length.
extern "C" fn several(_: usize, vectors: usize, count: usize, _: usize, _: usize, _: usize) {
    touch_vectors(vectors, low(count));
}

/// A descriptor, the address of a `struct msghdr`.
extern "C" fn message(_: usize, header: usize, _: usize, _: usize, _: usize, _: usize) {
    touch_message(header);
}

/// A descriptor, the address of an array of `struct mmsghdr`, its length.
extern "C" fn messages(_: usize, headers: usize, count: usize, _: usize, _: usize, _: usize) {
    const SIZE: usize = size_of::<libc::mmsghdr>();
    // UIO_MAXIOV: the kernel takes no more.
    for at in 0..low(count).min(1024) {
        let header = headers.wrapping_add(at * SIZE);
        // Where it says how much came.
        touch(header, SIZE);
        touch_message(header);
    }
}

/// The words of `struct msghdr`: name, its length, vectors, how many, control data, its length.
fn touch_message(header: usize) {
    let mut words = [0; 6];
    // All of it: the kernel writes flags behind them.
    touch(header, size_of::<libc::msghdr>());
    // An address that cannot be read is the kernel's to refuse.
    if copy_words(header, &mut words) == Ok(words.len()) {
        let [name, name_length, vectors, count, control, length] = words;
        touch(name, name_length & u32::MAX as usize);
        touch_vectors(vectors, count);
        touch(control, length);
    }
}

fn touch_vectors(vectors: usize, count: usize) {
    const SIZE: usize = size_of::<libc::iovec>();
    // UIO_MAXIOV: more are an error.
    if count > 1024 {
        return;
    }
    touch(vectors, count * SIZE);
    for at in 0..count {
        let mut vector = [0; 2];
        if copy_words(vectors.wrapping_add(at * SIZE), &mut vector) != Ok(vector.len()) {
            return;
        }
        touch(vector[0], vector[1]);
    }
}
