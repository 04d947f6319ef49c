//! AdamW (Loshchilov and Hutter 2019) whose state can be saved.

use candle_core::backprop::GradStore;
use candle_core::{bail, Result, Tensor, Var};
use candle_nn::{Optimizer, ParamsAdamW};

/// The numbers of candle_nn's AdamW, bit for bit, with a state that can be read and set.
#[derive(Debug)]
pub struct AdamW {
    learners: Vec<Learner>,
    step: usize,
    params: ParamsAdamW,
}

#[derive(Debug)]
struct Learner {
    var: Var,
    /// The decaying means of the gradient and of its square.
    moments: [Tensor; 2],
}

impl AdamW {
    /// How many steps were made.
    pub fn steps(&self) -> usize {
        self.step
    }

    /// The decaying means of the gradient and of its square, of each variable in their order.
    pub fn moments(&self) -> impl Iterator<Item = &[Tensor; 2]> {
        self.learners.iter().map(|learner| &learner.moments)
    }

    /// Goes on from the state that another had after `steps` steps.
    ///
    /// # Errors
    /// If there are not two moments of its shape and dtype for each variable.
    pub fn restore(&mut self, steps: usize, moments: Vec<[Tensor; 2]>) -> Result<()> {
        let fits = |(learner, moments): (&Learner, &[Tensor; 2])| {
            let var = &learner.var;
            moments.iter().all(|moment| moment.shape() == var.shape() && moment.dtype() == var.dtype())
        };
        if moments.len() != self.learners.len() || !self.learners.iter().zip(&moments).all(fits) {
            bail!(
                "state of AdamW: two moments for each of {} variables, of its shape, expected",
                self.learners.len()
            );
        }
        self.step = steps;
        for (learner, moments) in self.learners.iter_mut().zip(moments) {
            learner.moments = moments;
        }
        Ok(())
    }
}

impl Optimizer for AdamW {
    type Config = ParamsAdamW;

    fn new(vars: Vec<Var>, params: ParamsAdamW) -> Result<Self> {
        let learner = |var: Var| {
            let zeros = || var.as_detached_tensor().zeros_like();
            Ok(Learner { moments: [zeros()?, zeros()?], var })
        };
        let learners = vars.into_iter().filter(|var| var.dtype().is_float()).map(learner);
        Ok(Self { learners: learners.collect::<Result<_>>()?, step: 0, params })
    }

    fn step(&mut self, gradients: &GradStore) -> Result<()> {
        self.step += 1;
        let ParamsAdamW { lr, beta1, beta2, eps, weight_decay } = self.params.clone();
        let exponent = i32::try_from(self.step).unwrap_or(i32::MAX);
        // The means begin with zeros, for which these make up.
        let [grow1, grow2] = [beta1, beta2].map(|beta| 1. / (1. - beta.powi(exponent)));
        for Learner { var, moments: [mean, square] } in &mut self.learners {
            let Some(gradient) = gradients.get(var) else { continue };
            let gradient = gradient.detach();
            *mean = ((&*mean * beta1)? + (&gradient * (1. - beta1))?)?;
            *square = ((&*square * beta2)? + (gradient.sqr()? * (1. - beta2))?)?;
            let direction = ((&*mean * grow1)? / ((&*square * grow2)?.sqrt()? + eps)?)?;
            let decayed = (var.as_detached_tensor() * (1. - lr * weight_decay))?;
            var.set(&(decayed - (direction * lr)?)?)?;
        }
        Ok(())
    }

    fn learning_rate(&self) -> f64 {
        self.params.lr
    }

    fn set_learning_rate(&mut self, learning_rate: f64) {
        self.params.lr = learning_rate;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};

    /// The loss of both is the same: its gradients have all magnitudes, and change with the variables.
    fn loss(var: &Var, step: usize) -> Tensor {
        let factor = Tensor::arange(0f32, 12., &Device::Cpu).unwrap().reshape((3, 4)).unwrap();
        let factor = (factor - f64::from(step as u32 % 5)).unwrap();
        ((var.as_tensor() * &factor).unwrap().sin().unwrap() + var.sqr().unwrap()).unwrap().sum_all().unwrap()
    }

    fn bits(var: &Var) -> Vec<u32> {
        let values = var.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        values.into_iter().map(f32::to_bits).collect()
    }

    #[test]
    fn a_hundred_steps_are_those_of_candle_nn() {
        let start = Tensor::arange(-6f32, 6., &Device::Cpu).unwrap().reshape((3, 4)).unwrap();
        let [mine, theirs] = [(); 2].map(|()| Var::from_tensor(&start).unwrap());
        let params = ParamsAdamW { lr: 0.03, ..Default::default() };
        let mut this = AdamW::new(vec![mine.clone()], params.clone()).unwrap();
        let mut other = candle_nn::AdamW::new(vec![theirs.clone()], params).unwrap();
        for step in 0..100 {
            this.set_learning_rate(0.03 - 1e-4 * step as f64);
            other.set_learning_rate(0.03 - 1e-4 * step as f64);
            this.step(&loss(&mine, step).backward().unwrap()).unwrap();
            other.step(&loss(&theirs, step).backward().unwrap()).unwrap();
            assert_eq!(bits(&mine), bits(&theirs), "step {step}");
        }
        assert_ne!(bits(&mine), bits(&Var::from_tensor(&start).unwrap()));
    }

    #[test]
    fn a_restored_state_goes_on_alike() {
        let var = Var::zeros((3, 4), DType::F32, &Device::Cpu).unwrap();
        let mut whole = AdamW::new(vec![var.clone()], ParamsAdamW::default()).unwrap();
        for step in 0..7 {
            whole.step(&loss(&var, step).backward().unwrap()).unwrap();
        }
        let copy = Var::from_tensor(&var.as_tensor().copy().unwrap().detach()).unwrap();
        assert_ne!(copy.id(), var.id());
        let mut resumed = AdamW::new(vec![copy.clone()], ParamsAdamW::default()).unwrap();
        resumed.restore(whole.steps(), whole.moments().cloned().collect()).unwrap();
        for step in 7..12 {
            whole.step(&loss(&var, step).backward().unwrap()).unwrap();
            resumed.step(&loss(&copy, step).backward().unwrap()).unwrap();
            assert_eq!(bits(&copy), bits(&var));
        }
        let small = Tensor::zeros((2, 4), DType::F32, &Device::Cpu).unwrap();
        assert!(resumed.restore(1, vec![[small.clone(), small]]).is_err());
        assert!(resumed.restore(1, vec![]).is_err());
    }
}
