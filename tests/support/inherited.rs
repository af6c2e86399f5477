//! What the programs of a test inherit, however the tests were started: no signal that a shell has ignored.
//!
//! A script's `&` and nohup(1) have SIGINT, SIGQUIT or SIGHUP ignored, and so they would be in every program that a test
//! starts and sends one. A handler does as little to the tests, and is gone after an execve(2).
#![expect(unsafe_code, reason = "dispositions, set before any thread is there")]

extern "C" fn nothing(_: libc::c_int) {}

extern "C" fn handle_the_ignored() {
    for signal in [libc::SIGINT, libc::SIGQUIT, libc::SIGHUP, libc::SIGTERM] {
        // SAFETY: all zeroes are a valid disposition, which the first call fills in; the handler may run at any point.
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
