//! A page in headless Chromium, controlled through its DevTools pipe, without a network.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;

use serde_json::{Value, json};

use super::wait::TIMEOUT;

/// Chromium with one page.
pub(crate) struct Browser {
    child: Child,
    ask: ChildStdin,
    heard: Receiver<Value>,
    session: String,
    asked: u64,
    /// Events of the page since its start.
    pub(crate) events: Vec<Value>,
    _profile: tempfile::TempDir,
}

impl Browser {
    /// Starts Chromium; `None` if it is not installed.
    pub(crate) fn start() -> Option<Self> {
        Command::new("chromium").arg("--version").output().ok()?;
        let profile = tempfile::tempdir().unwrap();
        // Chromium reads descriptor 3 and writes descriptor 4: JSON messages, each terminated by a
        // zero byte.
        let script = "exec chromium \"$@\" 3<&0 4>&1 </dev/null >/dev/null 2>&1";
        let mut child = Command::new("sh")
            .args([
                "-c",
                script,
                "sh",
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
            ])
            .args([
                "--disable-dev-shm-usage",
                "--remote-debugging-pipe",
                "--no-first-run",
            ])
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .arg("about:blank")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (ask, answers) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (next_message, heard) = channel();
        thread::spawn(move || {
            for message in BufReader::new(answers).split(0) {
                let Ok(message) = message else { break };
                if next_message
                    .send(serde_json::from_slice(&message).unwrap())
                    .is_err()
                {
                    break;
                }
            }
        });
        let mut browser = Self {
            child,
            ask,
            heard,
            session: String::new(),
            asked: 0,
            events: Vec::new(),
            _profile: profile,
        };
        let target = browser.call("Target.createTarget", json!({"url": "about:blank"}));
        let attach = json!({"targetId": target["targetId"], "flatten": true});
        let attached = browser.call("Target.attachToTarget", attach);
        browser.session = attached["sessionId"].as_str().unwrap().to_owned();
        for domain in ["Page", "Network", "Runtime", "Log"] {
            browser.call(&format!("{domain}.enable"), json!({}));
        }
        Some(browser)
    }

    /// Calls a method of the DevTools protocol and returns its result.
    pub(crate) fn call(&mut self, method: &str, parameters: Value) -> Value {
        self.asked += 1;
        let mut message = json!({"id": self.asked, "method": method, "params": parameters});
        if !self.session.is_empty() {
            message["sessionId"] = self.session.clone().into();
        }
        self.ask
            .write_all(format!("{message}\0").as_bytes())
            .unwrap();
        loop {
            let answer = self.next_message(method);
            if answer["id"] == self.asked {
                assert!(answer["error"].is_null(), "{method}: {answer}");
                return answer["result"].clone();
            }
        }
    }

    /// Returns the next message.
    fn next_message(&mut self, what: &str) -> Value {
        let heard = self.heard.recv_timeout(TIMEOUT);
        let message = heard.unwrap_or_else(|_| panic!("no answer of chromium to {what}"));
        if message["method"].is_string() {
            self.events.push(message.clone());
        }
        message
    }

    /// Opens a file with this width and colour scheme, and waits until it has loaded.
    pub(crate) fn open(&mut self, file: &Path, width: u32, scheme: &str) {
        let features = json!([{"name": "prefers-color-scheme", "value": scheme}]);
        self.call("Emulation.setEmulatedMedia", json!({"features": features}));
        let size =
            json!({"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500});
        self.call("Emulation.setDeviceMetricsOverride", size);
        let before = self.events.len();
        let url = format!("file://{}", file.display());
        self.call("Page.navigate", json!({"url": url}));
        let is_loaded = |event: &Value| event["method"] == "Page.loadEventFired";
        while !self.events[before..].iter().any(is_loaded) {
            self.next_message("Page.navigate");
        }
    }

    /// Returns the value of an expression in the page.
    pub(crate) fn value(&mut self, expression: &str) -> Value {
        let asked = json!({"expression": expression, "returnByValue": true});
        let answer = self.call("Runtime.evaluate", asked);
        assert!(
            answer["exceptionDetails"].is_null(),
            "{expression}: {answer}"
        );
        answer["result"]["value"].clone()
    }

    /// Returns a screenshot of the whole page, as PNG in base64.
    pub(crate) fn screenshot(&mut self) -> String {
        let asked = json!({"format": "png", "captureBeyondViewport": true});
        let answer = self.call("Page.captureScreenshot", asked);
        answer["data"].as_str().unwrap().to_owned()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Chromium ends its processes when its input ends.
        let close = json!({"id": 0, "method": "Browser.close"});
        let _ = self.ask.write_all(format!("{close}\0").as_bytes());
        let deadline = std::time::Instant::now() + TIMEOUT;
        while self.child.try_wait().is_ok_and(|status| status.is_none()) {
            if std::time::Instant::now() > deadline {
                let _ = self.child.kill();
            }
            thread::sleep(std::time::Duration::from_millis(5));
        }
    }
}
