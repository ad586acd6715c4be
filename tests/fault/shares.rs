//! Several instances without their Redis: together they admit no more than a burst, and when it is back, a burst more.

use super::{unhurt, until_it_decides};
use crate::support::calls::{Caller, allowed};
use crate::support::{Redis, Tollgate, engines, say};

const INSTANCES: usize = 4;

/// Nothing flows in while the test looks.
const BURST: u32 = 100;

async fn admitted(callers: &[Caller], degraded: bool) -> Vec<u32> {
    let mut admitted = Vec::new();
    for caller in callers {
        let mut here = 0;
        for _ in 0..BURST + 10 {
            let response = caller.ask("everybody", "read", None).await;
            assert_eq!(response.degraded, degraded, "{response:?}");
            here += u32::from(allowed(&response));
        }
        admitted.push(here);
    }
    admitted
}

#[tokio::test]
async fn each_gives_its_share_and_together_a_burst() {
    for engine in engines() {
        let mut redis = Redis::start(engine).await;
        let config = format!(
            "store: {{ url: \"{}\", deadline: 5s }}\nclasses: {{ read: {{ rate: 1/h, burst: {BURST} }} }}",
            redis.url()
        );
        let (mut servers, mut callers) = (Vec::new(), Vec::new());
        for _ in 0..INSTANCES {
            servers.push(Tollgate::start(&config).await);
        }
        for server in &mut servers {
            callers.push(server.serving().await);
            // Each has heard of all others.
            let told = format!("instances={INSTANCES}");
            server.says(&told).await;
        }
        for caller in &callers {
            for _ in 0..10 {
                assert!(allowed(&caller.ask("everybody", "read", None).await));
            }
        }

        redis.kill();
        for caller in &callers {
            caller.until_ready(false).await;
        }
        let alone = admitted(&callers, true).await;
        assert_eq!(alone, [BURST / 4; INSTANCES], "{engine:?}: a share each");

        // It is empty now, so everything begins with one more burst.
        redis.restart().await;
        for caller in &callers {
            caller.until_ready(true).await;
            until_it_decides(caller).await;
        }
        let together = admitted(&callers, false).await;
        assert_eq!(together.iter().sum::<u32>(), BURST, "{engine:?}: {together:?}");

        // Away once more: what was given here is not given again.
        redis.kill();
        for caller in &callers {
            caller.until_ready(false).await;
        }
        assert_eq!(admitted(&callers, true).await, [0; INSTANCES], "{engine:?}");
        say(&format!("{engine:?}: {INSTANCES} instances without Redis admit {alone:?} of {BURST}"));
        servers.iter_mut().for_each(unhurt);
    }
}
