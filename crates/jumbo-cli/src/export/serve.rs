//! GET /metrics over HTTP/1.1.
//!
//! Each connection has a thread and a deadline for all of it: a client that sends or reads slowly holds up no other client, and
//! goes in the end. One request a connection. std and a parser of the request's head do; there is no body to be read.

use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use jumbo_host::kernel::process::Signals;
use prometheus_client::encoding::prometheus_text::CONTENT_TYPE;
use rustix::event::{PollFd, PollFlags};

use crate::signal::poll;
use crate::view::tell;

/// The time that a client has to send its request, and the same again to read the answer.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(5);
/// Connections at a time; more are closed at once.
const MAX_CLIENTS: usize = 64;
/// A request's head is no longer than this.
const MAX_HEAD_BYTES: usize = 16 << 10;
const MAX_HEADERS: usize = 64;

/// Serves what `metrics` gives, with the bound `max_series`.
pub(super) fn until_ended(
    address: SocketAddr,
    metrics: fn(usize) -> anyhow::Result<String>,
    max_series: usize,
) -> anyhow::Result<ExitCode> {
    let listener = TcpListener::bind(address).with_context(|| {
        format!("cannot listen on {address}\nhint: port 0 takes a free one, 127.0.0.1 this host's clients alone")
    })?;
    listener.set_nonblocking(true)?;
    // Before there are threads, which inherit what is blocked.
    let signals = Signals::take().context("cannot read signals from a descriptor")?;
    tell(&format!(
        "serving http://{}/metrics",
        listener.local_addr()?
    ));
    let (clients, reading) = (Arc::new(AtomicUsize::new(0)), Arc::new(Mutex::new(())));
    loop {
        let fds = [signals.as_fd(), listener.as_fd()];
        let mut ready = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        poll(&mut ready, None)?;
        while let Some(signal) = signals.next()? {
            if let libc::SIGINT | libc::SIGTERM | libc::SIGHUP | libc::SIGQUIT = signal.number {
                return Ok(ExitCode::SUCCESS);
            }
        }
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) => {
                // None is there any more, or there is no descriptor for it: until a client goes.
                if error.kind() != ErrorKind::WouldBlock {
                    std::thread::sleep(Duration::from_millis(50));
                }
                continue;
            }
        };
        let client = Client(Arc::clone(&clients));
        if clients.fetch_add(1, Ordering::Relaxed) >= MAX_CLIENTS {
            continue;
        }
        let reading = Arc::clone(&reading);
        let thread = std::thread::Builder::new().name(String::from("jumbo-client"));
        let answer = move || {
            let _client = client;
            let metrics = || {
                // One reader at a time: the others would take the processor from it.
                let _reading = reading.lock().unwrap_or_else(PoisonError::into_inner);
                metrics(max_series)
            };
            // What became of a client that went away is its own matter.
            let _ = serve(stream, metrics);
        };
        // Without a thread the connection is closed.
        let _ = thread.spawn(answer);
    }
}

/// Counts a client for as long as it is there.
struct Client(Arc<AtomicUsize>);

impl Drop for Client {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn serve(mut stream: TcpStream, metrics: impl Fn() -> anyhow::Result<String>) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    let (status, has_body, body) = match request(&mut stream)? {
        None => ("400 Bad Request", true, String::from("no HTTP request\n")),
        Some((method, _)) if method != "GET" && method != "HEAD" => {
            let allowed = String::from("GET and HEAD are allowed\n");
            ("405 Method Not Allowed\r\nAllow: GET, HEAD", true, allowed)
        }
        Some((method, path)) if path == "/metrics" => {
            let (status, body) = match metrics() {
                Ok(text) => ("200 OK", text),
                Err(error) => ("500 Internal Server Error", format!("{error:#}\n")),
            };
            (status, method == "GET", body)
        }
        Some((method, _)) => {
            let place = String::from("the metrics are at /metrics\n");
            ("404 Not Found", method == "GET", place)
        }
    };
    let mut answer = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    if has_body {
        answer.push_str(&body);
    }
    send(&mut stream, answer.as_bytes())
}

/// The method and the path, without a query; `None` where it is no request.
fn request(stream: &mut TcpStream) -> io::Result<Option<(String, String)>> {
    let deadline = Instant::now() + CLIENT_TIMEOUT;
    let (mut head, mut chunk) = (Vec::new(), [0; 1024]);
    loop {
        stream.set_read_timeout(Some(left(deadline)?))?;
        let length = stream.read(&mut chunk)?;
        head.extend_from_slice(chunk.get(..length).unwrap_or_default());
        let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
        let mut request = httparse::Request::new(&mut headers);
        match request.parse(&head) {
            Ok(httparse::Status::Complete(_)) => {
                let path = request.path.unwrap_or_default().split('?').next();
                let method = request.method.unwrap_or_default().to_owned();
                return Ok(path.map(|path| (method, path.to_owned())));
            }
            Ok(httparse::Status::Partial) if length > 0 && head.len() < MAX_HEAD_BYTES => {}
            Ok(httparse::Status::Partial) | Err(_) => return Ok(None),
        }
    }
}

fn send(stream: &mut TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    let deadline = Instant::now() + CLIENT_TIMEOUT;
    while !bytes.is_empty() {
        stream.set_write_timeout(Some(left(deadline)?))?;
        let written = stream.write(bytes)?;
        bytes = bytes.get(written..).unwrap_or_default();
    }
    Ok(())
}

/// The time until a deadline, which is no time at all in the end.
fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    Some(left)
        .filter(|left| !left.is_zero())
        .ok_or_else(|| ErrorKind::TimedOut.into())
}
