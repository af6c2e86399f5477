//! Calls that read or write the program's memory: read(2) and similar ones; accept(2) and wait(2),
//! which lose a connection or a child's status if they cannot write.
//!
//! A system call on untouched shared memory that user space populates
//! ([`jumbo_inside::shmem::user`]) would fail with EFAULT: so the memory is populated before the
//! call. Without such memory a call costs a comparison and a jump.
//!
//! All of them are cancellation points, and a cancellation unwinds the stack, which Rust frames do
//! not support. So each function is a few instructions that jump to the next definition, with
//! registers and stack unchanged. Until the jump, .eh_frame describes the stack to debuggers,
//! profilers and signal handlers.

use core::arch::naked_asm;
use core::ffi::{c_int, c_long};

use jumbo_inside::shmem::user;
use jumbo_inside::sys::copy_words;

use crate::next;
use crate::own_stack::on;

/// Defines functions: the name, the number of the same system call, and the function that takes
/// their arguments, at most six.
macro_rules! buffers {
    ($($name:ident $($number:ident)?: $touch:ident;)*) => {
        /// System call numbers of the table.
        pub(crate) const NUMBERS: &[c_long] = &[$($(libc::$number,)?)*];

        /// Populates the memory that the system call of that number reads or writes.
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
                $($(libc::$number => $touch(first, second, third, fourth, fifth, sixth),)?)*
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
                "call {touch}",
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
                touch = sym $touch,
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
                "bl {touch}",
                "ldr x30, [sp, #48]", ".cfi_restore x30",
                "ldp x4, x5, [sp, #32]", "ldp x2, x3, [sp, #16]",
                "ldp x0, x1, [sp], #64", ".cfi_adjust_cfa_offset -64",
                "2:",
                "adrp x16, {next}",
                "ldr x16, [x16, :lo12:{next}]",
                "br x16",
                ".cfi_endproc",
                ranges = sym RANGES,
                touch = sym $touch,
                next = sym next::$name,
            );
        }
        )*
    };
}

/// Number of ranges that user space populates, for the machine code above.
pub(crate) static RANGES: &core::sync::atomic::AtomicUsize = user::RANGES;

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

/// Maximum number of vectors or messages of one call.
const UIO_MAXIOV: usize = 1024;

/// Returns the lower half of a register with an `int`; the upper half is undefined.
const fn low(word: usize) -> usize {
    word & u32::MAX as usize
}

#[inline(never)]
fn touch(address: usize, length: usize) {
    on(|| user::touch(address, length));
}

/// Touches the name of a socket and the name's length, which the kernel writes.
fn touch_name(name: usize, length: usize) {
    // The longest name that the kernel writes.
    touch(name, size_of::<libc::sockaddr_storage>());
    touch(length, size_of::<libc::socklen_t>());
}

fn touch_status(status: usize) {
    touch(status, size_of::<c_int>());
}

// Each function below takes six registers, of which the call may have set fewer.

/// Arguments: descriptor, address, length.
extern "C" fn one(_: usize, address: usize, length: usize, _: usize, _: usize, _: usize) {
    touch(address, length);
}

/// Arguments: descriptor, address, length, flags, address of a name, address of its length.
extern "C" fn from(_: usize, address: usize, length: usize, _: usize, name: usize, size: usize) {
    touch(address, length);
    touch_name(name, size);
}

/// Arguments: descriptor, address, length, flags, address of a name, its length.
extern "C" fn to(_: usize, address: usize, length: usize, _: usize, name: usize, size: usize) {
    touch(address, length);
    touch(name, low(size));
}

/// Arguments: descriptor, address of a name, address of its length.
extern "C" fn accepted(_: usize, name: usize, length: usize, _: usize, _: usize, _: usize) {
    touch_name(name, length);
}

/// Arguments: address of a status.
extern "C" fn first(status: usize, _: usize, _: usize, _: usize, _: usize, _: usize) {
    touch_status(status);
}

/// Arguments: process, address of a status.
extern "C" fn second(_: usize, status: usize, _: usize, _: usize, _: usize, _: usize) {
    touch_status(status);
}

/// Arguments: address of a status, options, address of a `struct rusage`.
extern "C" fn usage(status: usize, _: usize, used: usize, _: usize, _: usize, _: usize) {
    touch_status(status);
    touch(used, size_of::<libc::rusage>());
}

/// Arguments: process, address of a status, options, address of a `struct rusage`.
extern "C" fn usage_of(_: usize, status: usize, _: usize, used: usize, _: usize, _: usize) {
    touch_status(status);
    touch(used, size_of::<libc::rusage>());
}

/// Arguments: kind of ID, ID, address of a `siginfo_t`.
extern "C" fn id(_: usize, _: usize, information: usize, _: usize, _: usize, _: usize) {
    touch(information, size_of::<libc::siginfo_t>());
}

/// Arguments: address, size of an element, number of elements.
extern "C" fn elements(address: usize, size: usize, count: usize, _: usize, _: usize, _: usize) {
    touch(address, size.saturating_mul(count));
}

/// Arguments: descriptor, address of an array of `struct iovec`, its length.
extern "C" fn several(_: usize, vectors: usize, count: usize, _: usize, _: usize, _: usize) {
    on(|| touch_vectors(vectors, low(count)));
}

/// Arguments: descriptor, address of a `struct msghdr`.
extern "C" fn message(_: usize, header: usize, _: usize, _: usize, _: usize, _: usize) {
    on(|| touch_message(header));
}

/// Arguments: descriptor, address of an array of `struct mmsghdr`, its length.
extern "C" fn messages(_: usize, headers: usize, count: usize, _: usize, _: usize, _: usize) {
    const BYTES: usize = size_of::<libc::mmsghdr>();
    on(|| {
        // The kernel takes no more.
        for at in 0..low(count).min(UIO_MAXIOV) {
            let header = headers.wrapping_add(at * BYTES);
            // All of it: the kernel writes the length of the message.
            touch(header, BYTES);
            touch_message(header);
        }
    });
}

/// Touches the parts of a `struct msghdr`.
fn touch_message(header: usize) {
    let mut words = [0; 6];
    // All of it: the kernel writes the flags.
    touch(header, size_of::<libc::msghdr>());
    // The kernel refuses an unreadable address.
    if copy_words(header, &mut words) == Ok(words.len()) {
        let [name, name_length, vectors, count, control, length] = words;
        touch(name, low(name_length));
        touch_vectors(vectors, count);
        touch(control, length);
    }
}

fn touch_vectors(vectors: usize, count: usize) {
    const BYTES: usize = size_of::<libc::iovec>();
    // More are an error.
    if count > UIO_MAXIOV {
        return;
    }
    touch(vectors, count * BYTES);
    for at in 0..count {
        let mut vector = [0; 2];
        if copy_words(vectors.wrapping_add(at * BYTES), &mut vector) != Ok(vector.len()) {
            return;
        }
        touch(vector[0], vector[1]);
    }
}
