for (const figure of document.querySelectorAll(".curve")) {
  const points = JSON.parse(figure.dataset.points);
  const slider = figure.querySelector("input");
  const line = figure.querySelector(".cursor");
  const show = () => {
    const [x, words] = points[slider.value];
    line.setAttribute("x1", x);
    line.setAttribute("x2", x);
    figure.querySelector("output").textContent = words;
    slider.setAttribute("aria-valuetext", words);
  };
  slider.addEventListener("input", show);
  figure.classList.add("live");
  show();
}
