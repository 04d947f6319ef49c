//! What ranks do together, and how their failures end all of them.

use candle_core::{DType, Device, Tensor, Var};
use candle_quant::parallel::{run, Launch, Rank};
use candle_quant::{Error, Result};
use half::bf16;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

const SIZES: [usize; 5] = [1, 2, 3, 4, 8];

fn devices(count: usize) -> Vec<Device> {
    vec![Device::Cpu; count]
}

/// What rank `rank` brings: numbers whose f32 sum depends on the order.
fn numbers(rank: usize) -> Vec<f32> {
    (0..6).map(|i| [1e8, 1., -1e8, 0.3][(rank + i) % 4] * (1. + i as f32)).collect()
}

#[test]
fn sums_are_in_the_order_of_ranks_and_alike_everywhere() {
    for count in SIZES {
        let sums = run(&devices(count), move |rank| {
            let x = Tensor::from_vec(numbers(rank.index()), (2, 3), rank.device())?;
            Ok(rank.all_reduce_sum(&x)?.flatten_all()?.to_vec1::<f32>()?)
        })
        .unwrap();
        let of_element = |i: usize| (1..count).fold(numbers(0)[i], |sum, rank| sum + numbers(rank)[i]);
        let expected: Vec<f32> = (0..6).map(of_element).collect();
        assert_eq!(sums, vec![expected; count]);
    }
}

/// A gradient would lack what the other ranks have: it is refused, not left out.
#[test]
fn what_ranks_exchange_has_no_gradient() {
    let told = run(&devices(2), |rank| {
        let x = Var::ones((2, 4), DType::F32, rank.device())?;
        let exchanged = [
            rank.all_reduce_sum(&x)?,
            rank.all_gather(&x, 0)?,
            rank.reduce_scatter(&x, 0)?,
            rank.broadcast(&x, 0)?,
        ];
        let refused = |y: &Tensor| y.sqr()?.sum_all()?.backward();
        Ok(exchanged.each_ref().map(|y| refused(y).map(|_| ()).unwrap_err().to_string()))
    })
    .unwrap();
    for told in told.iter().flatten() {
        assert!(told.contains("exchange-between-ranks"), "{told}");
    }
}

#[test]
fn half_precision_is_summed_in_f32_and_rounded_once() {
    // In bf16 itself, 256 + 1 is 256.
    let sums = run(&devices(4), |rank| {
        let x = Tensor::new(&[if rank.index() == 0 { 256f32 } else { 1. }], rank.device())?;
        let sum = rank.all_reduce_sum(&x.to_dtype(DType::BF16)?)?;
        Ok(sum.to_vec1::<bf16>()?)
    })
    .unwrap();
    assert_eq!(sums, vec![[bf16::from_f32(260.)]; 4]); // 259, rounded to even
}

#[test]
fn parts_of_different_sizes_are_joined_in_order() {
    for count in SIZES {
        let joined = run(&devices(count), |rank| {
            let own = vec![rank.index() as u32; 2 * (rank.index() + 1)];
            let x = Tensor::from_vec(own, (2, rank.index() + 1), rank.device())?;
            Ok(rank.all_gather(&x, 1)?.to_vec2::<u32>()?)
        })
        .unwrap();
        let row: Vec<u32> = (0..count as u32).flat_map(|rank| vec![rank; rank as usize + 1]).collect();
        assert_eq!(joined, vec![[row.clone(), row]; count]);
    }
}

#[test]
fn every_rank_gets_its_share_of_a_sum() {
    let shares = run(&devices(3), |rank| {
        let x = (Tensor::arange(0f32, 14., rank.device())?.reshape((2, 7))? + rank.index() as f64)?;
        Ok(rank.reduce_scatter(&x, 1)?.to_vec2::<f32>()?)
    })
    .unwrap();
    // 3 (i + 1) for i = 0..7 and 7..14, in shares of 3, 2 and 2.
    let row = |first: u16, len: u16| (first..first + len).map(|i| 3. * f32::from(i + 1)).collect::<Vec<_>>();
    assert_eq!(shares, [[row(0, 3), row(7, 3)], [row(3, 2), row(10, 2)], [row(5, 2), row(12, 2)]]);
    let error = run(&devices(3), |rank| {
        rank.reduce_scatter(&Tensor::zeros(2, DType::F32, rank.device())?, 0).map(drop)
    });
    assert!(error.unwrap_err().to_string().contains("3 or more entries along 0"));
}

#[test]
fn one_rank_tells_all() {
    for root in 0..3 {
        let told = run(&devices(3), move |rank| {
            Ok(rank.broadcast(&Tensor::new(rank.index() as u32, rank.device())?, root)?.to_scalar::<u32>()?)
        });
        assert_eq!(told.unwrap(), [root as u32; 3]);
    }
    let told = run(&devices(2), |rank| rank.broadcast(&Tensor::new(0u32, rank.device())?, 2).map(drop));
    assert!(told.unwrap_err().to_string().contains("expected one of the group, found 2"));
}

#[test]
fn nobody_passes_a_barrier_before_all_are_there() {
    let arrived = Arc::new(AtomicUsize::new(0));
    let seen = run(&devices(4), move |rank| {
        let mut seen = Vec::new();
        for round in 1..=50 {
            arrived.fetch_add(1, Ordering::SeqCst);
            rank.barrier()?;
            seen.push(arrived.load(Ordering::SeqCst) >= 4 * round);
            rank.barrier()?;
        }
        Ok(seen)
    })
    .unwrap();
    assert!(seen.concat().into_iter().all(|all| all));
}

/// Runs a group whose ranks go on summing until something fails, long before the usual timeout.
fn failing(
    count: usize,
    launch: Launch,
    body: impl Fn(&Rank) -> Result<()> + Send + Sync + 'static,
) -> Error {
    let start = Instant::now();
    let result = launch.run(&devices(count), move |rank| {
        body(&rank)?;
        loop {
            rank.all_reduce_sum(&Tensor::ones(3, DType::F32, rank.device())?)?;
        }
        #[expect(unreachable_code)]
        Ok(())
    });
    assert!(start.elapsed() < Duration::from_secs(200), "waited for the timeout: {:?}", start.elapsed());
    result.unwrap_err()
}

#[test]
fn an_error_of_one_rank_ends_all_with_its_message() {
    for failed in 0..4 {
        let error = failing(4, Launch::default(), move |rank| match rank.index() {
            index if index == failed => Err(Error::File {
                path: "model.safetensors".into(),
                problem: "is damaged".into(),
                remedy: "fetch it again".into(),
            }),
            _ => Ok(()),
        });
        assert!(matches!(error, Error::Rank { rank, .. } if rank == failed), "{error:?}");
        let expected = format!("rank {failed}: model.safetensors: is damaged; fetch it again");
        assert_eq!(error.to_string(), expected);
    }
}

#[test]
fn a_panic_of_one_rank_ends_all_with_its_message() {
    let error = failing(3, Launch::default(), |rank| {
        assert_ne!(rank.index(), 1, "the fan has stopped");
        Ok(())
    });
    let text = error.to_string();
    assert!(text.starts_with("rank 1: panicked: ") && text.contains("the fan has stopped"), "{text}");
}

#[test]
fn a_rank_that_never_comes_is_named_after_the_timeout() {
    let error = failing(3, Launch::default().timeout(Duration::from_secs(10)), |rank| {
        rank.barrier()?;
        if rank.index() == 2 {
            thread::sleep(Duration::from_secs(600));
        }
        Ok(())
    });
    let text = error.to_string();
    assert!(text.starts_with("rank 2: has not come to all_reduce_sum of F32 [3] within 10 s"), "{text}");
}

#[test]
fn a_rank_that_has_ended_is_not_waited_for() {
    let start = Instant::now();
    let error = run(&devices(3), |rank| match rank.index() {
        1 => Ok(()),
        _ => rank.barrier(),
    });
    assert!(start.elapsed() < Duration::from_secs(200), "waited for the timeout: {:?}", start.elapsed());
    let text = error.unwrap_err().to_string();
    assert!(text.starts_with("rank 1: has ended, while rank "), "{text}");
    assert!(text.ends_with(" waits for it at barrier"), "{text}");
}

#[test]
fn ranks_at_different_operations_are_an_error() {
    let differing: [fn(&Rank) -> Result<()>; 4] = [
        |rank| match rank.index() {
            0 => rank.barrier(),
            _ => rank.all_reduce_sum(&Tensor::zeros(2, DType::F32, rank.device())?).map(drop),
        },
        |rank| {
            let x = Tensor::zeros(2 + rank.index(), DType::F32, rank.device())?;
            rank.all_reduce_sum(&x).map(drop)
        },
        |rank| {
            let dtype = [DType::F32, DType::F16][rank.index()];
            rank.all_gather(&Tensor::zeros((2, 2), dtype, rank.device())?, 0).map(drop)
        },
        |rank| rank.broadcast(&Tensor::zeros(2, DType::F32, rank.device())?, rank.index()).map(drop),
    ];
    for body in differing {
        let text = run(&devices(2), move |rank| body(&rank)).unwrap_err().to_string();
        assert!(text.contains(" is at ") || text.contains(": is at "), "{text}");
        assert!(text.contains("while rank "), "{text}");
    }
}

#[test]
fn wrong_arguments_are_errors() {
    assert!(run(&[], |_| Ok(())).unwrap_err().to_string().contains("one for each rank"));
    let error =
        run(&devices(2), |rank| rank.all_gather(&Tensor::zeros(2, DType::F32, rank.device())?, 1).map(drop));
    assert!(error.unwrap_err().to_string().contains("dimension of a collective"));
}
