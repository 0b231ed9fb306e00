//! Files in Envoy's form, and descriptors as a server of Envoy's protocol gets them: the file is refused, or decides
//! about any descriptors. Its conversion can be read, but for the names that a program would register.
#![no_main]

use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use tower_ratelimit::clock::ManualClock;
use tower_ratelimit::key::TrustedProxies;
use tower_ratelimit::rules::{Descriptor, DescriptorRequest, Rules, RulesErrorKind, convert_envoy};
use tower_ratelimit::{Headers, MemoryLimiter, Quota};

/// Makes a descriptor of a line: what is asked of it, its hits, and its entries.
fn ask(request: DescriptorRequest, line: &str) -> DescriptorRequest {
    let mut bytes = line.bytes();
    let (verb, hits) = (bytes.next().unwrap_or(0), u64::from(bytes.next().unwrap_or(0)));
    let entries = line.get(2..).unwrap_or_default().split(',').filter_map(|entry| entry.split_once('='));
    let descriptor = Descriptor::new(entries).hits(if hits == 0xff { u64::MAX } else { hits % 16 });
    let quota = || Quota::fixed_window(hits, Duration::from_secs(60)).expect("every limit of a minute is possible");
    match verb {
        b'-' => request.refund(descriptor),
        b'<' => request.refund_under(descriptor, quota()),
        b'>' => request.charge_under(descriptor, quota()),
        _ => request.charge(descriptor),
    }
}

// The file begins with its domain. It ends at the first zero byte, and a descriptor is in each line after it.
fuzz_target!(|bytes: &[u8]| {
    let (file, asked) = match bytes.iter().position(|byte| *byte == 0) {
        Some(end) => (&bytes[..end], &bytes[end + 1..]),
        None => (bytes, [].as_slice()),
    };
    let file = [b"domain: d\ndescriptors:\n", file].concat();
    if let Ok(native) = convert_envoy(&file) {
        let proxies = TrustedProxies::count(1).expect("one proxy is possible");
        if let Err(error) = Rules::builder().trusted_proxies(proxies).read_text(&*native) {
            assert!(error.problems().iter().all(|problem| problem.kind() == RulesErrorKind::Name), "{native}\n{error}");
        }
    }
    let builder = Rules::builder().descriptors(|_| [Descriptor::new([("a", "b")])]);
    let Ok(rules) = builder.read_text(file) else { return };
    let limiter =
        MemoryLimiter::builder().max_keys(64).clock(ManualClock::new()).build().expect("64 keys are possible");
    let limits = rules.descriptor_limits(limiter).expect("the file has Envoy's form");
    let asked = String::from_utf8_lossy(asked);
    // The example's server takes at most as many.
    let request = asked.split('\n').take(100).fold(DescriptorRequest::new("d"), ask);
    for _ in 0..3 {
        let Poll::Ready(answer) = pin!(limits.decide(&request)).poll(&mut Context::from_waker(Waker::noop())) else {
            panic!("a limiter in memory answers at once");
        };
        let answer = answer.expect("a limiter in memory never fails");
        assert_eq!(answer.statuses().len(), asked.split('\n').take(100).count());
        assert!(answer.is_over_limit() || answer.statuses().iter().all(|status| !status.is_over_limit()));
        let _ = answer.headers(&Headers::draft_11());
    }
});
