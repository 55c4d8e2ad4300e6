// Names of the attribution methods and of their measures.
export const METHODS = {
  attention: 'Attention weights',
  attention_norm: 'Weighted norms',
  rollout: 'Attention rollout',
  posterior: 'Posterior of the row',
  input_x_gradient: 'Input × gradient',
  integrated_gradients: 'Integrated gradients',
  occlusion: 'Occlusion',
  value_zeroing: 'Value zeroing',
};

export const MEASURES = {
  comprehensiveness: 'Comprehensiveness',
  random_comprehensiveness: 'of random rows',
  sufficiency: 'Sufficiency',
  random_sufficiency: 'of random rows',
  rank_correlation: 'Rank correlation with occlusion',
  randomisation: 'Rank correlation with shuffled weights',
  seed_variance: 'Divergence from other seeds, bits',
  completeness_error: 'Completeness error',
  baseline_change: 'Worth of the whole source',
};
