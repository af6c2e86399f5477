//! Signal dispositions that programs inherit, made independent of the way tests were started.
//!
//! A script's `&` and nohup(1) ignore SIGINT, SIGQUIT or SIGHUP, and so would every program that a
//! test starts. A handler protects the tests equally, and execve(2) resets it.
#![expect(unsafe_code, reason = "dispositions, set before any thread is there")]

extern "C" fn nothing(_: libc::c_int) {}

extern "C" fn handle_the_ignored() {
    for signal in [libc::SIGINT, libc::SIGQUIT, libc::SIGHUP, libc::SIGTERM] {
        // SAFETY: all zeroes are a valid disposition, which the first call fills in; the handler
        // may run at any point.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            libc::sigaction(signal, std::ptr::null(), &raw mut action);
            if action.sa_sigaction == libc::SIG_IGN {
                action.sa_sigaction = nothing as extern "C" fn(libc::c_int) as usize;
                action.sa_flags = libc::SA_RESTART;
                libc::sigaction(signal, &raw const action, std::ptr::null_mut());
            }
        }
    }
}

#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = handle_the_ignored;
